// The report on one run. Built once; `update` shows new data.

class OneRun {
  constructor(parent, headingId, beside = false) {
    this.axis = "t";
    this.beside = beside;
    this.parent = parent;
    this.verdict = el("p", { class: "verdict" });
    this.meter = el("progress", { max: "1", "aria-label": "share of the budget", hidden: true });
    this.tiles = el("dl", { class: "tiles" });
    this.notes = el("ul", { class: "notes", hidden: true });
    this.title = el("p", { class: "title", hidden: !beside });
    this.about = el("p", { class: "about" });
    parent.append(this.title, this.about, this.verdict, this.meter, this.tiles, this.notes);
    this.learning(parent, headingId);
    this.working(parent, headingId);
    this.telling(parent, headingId);
    this.making(parent, headingId);
  }

  learning(parent, id) {
    const learning = this.learningBox = section(parent, "Learning", `${id}-learning`);
    new Choice(learning, "what charts are drawn over", [["t", "over time"], ["samples", "over samples"]], (value) => {
      this.axis = value;
      this.update(this.run);
    });
    const grid = this.learningGrid = el("div", { class: "grid" });
    learning.append(grid);
    this.loss = new LineChart(grid, "Loss");
    this.accuracy = new LineChart(grid, "Accuracy");
    this.reported = new Map();
    this.norm = new LineChart(grid, "Weight norm", { height: 200 });
    this.factor = new LineChart(grid, "Step limit", { height: 200 });
    this.rate = new LineChart(grid, "Learning rate", { height: 200 });
    this.classes = new Rows(grid, "Test accuracy by class");
  }

  working(parent, id) {
    this.pace = section(parent, "Pace", `${id}-pace`);
    this.findings = el("p", { class: "findings" });
    this.timeline = new Timeline(this.pace, "Timeline of workers", { wide: true });
    this.pace.append(this.findings);
    const grid = this.paceGrid = el("div", { class: "grid" });
    this.pace.append(grid);
    this.speed = new LineChart(grid, "Throughput");
    this.staleness = new Histogram(grid, "Staleness of pushes");
    this.live = new LineChart(grid, "Live workers", { height: 160 });
    this.bytesName = el("summary");
    this.bytesBox = el("details", { class: "fold" }, this.bytesName);
    this.pace.append(this.bytesBox);
    this.bytes = new LineChart(this.bytesBox, "Bytes moved", { height: 160 });
    this.workersBox = el("details", { class: "fold" }, el("summary", {}, "Each worker"));
    this.pace.append(this.workersBox);
    this.workers = new SortedTable(this.workersBox, WORKER_COLUMNS, { caption: "Each worker", sortBy: null, most: 15 });
    this.workersCut = el("p", { class: "findings" });
    this.workersBox.append(this.workersCut);
  }

  telling(parent, id) {
    this.events = section(parent, "Events", `${id}-events`);
    this.eventList = el("ol", { class: "events" });
    this.events.append(this.eventList);
  }

  making(parent, id) {
    const made = section(parent, "Provenance", `${id}-made`);
    this.command = el("pre", { class: "command" });
    this.closing = el("pre", { class: "closing" });
    this.machine = el("dl", { class: "facts" });
    this.settings = el("div", { class: "settings" });
    const ended = el("div", {}, el("h3", {}, "Closing lines"), this.closing);
    const machine = el("div", {}, el("h3", {}, "Machine"), this.machine);
    made.append(el("h3", {}, "Command"), this.command, el("div", { class: "grid" }, ended, machine), el("h3", {}, "Settings"), this.settings);
    this.ended = ended;
  }

  update(run) {
    this.run = run;
    setText(this.title, run.title || "");
    setText(this.about, aboutOf(run));
    setAdvice(this.verdict, run.verdict);
    const share = run.figures.fraction;
    this.meter.hidden = !run.going_on || !known(share);
    this.meter.value = share || 0;
    factList(this.tiles, tilesOf(run), true);
    this.notes.hidden = !run.notes.length;
    drawOnce(this.notes, run.notes, () => this.notes.replaceChildren(...run.notes.map((text) => el("li", {}, text))));
    this.updateLearning(run);
    this.updatePace(run);
    const listed = run.happenings;
    this.events.hidden = !listed.length;
    const left = run.happenings_left_out ? [el("li", { class: "quiet" }, `${run.happenings_left_out.toLocaleString("en-US")} more, between these, are left out`)] : [];
    drawOnce(this.eventList, [listed, run.happenings_left_out], () =>
      this.eventList.replaceChildren(...listed.map((one) => el("li", {}, el("time", {}, clock(one.t)), ` ${one.text}`)), ...left));
    setText(this.command, run.command || "not known: this run was made before commands were kept");
    this.ended.hidden = !run.closing.length;
    setText(this.closing, run.closing.join("\n"));
    drawOnce(this.machine, machineOf(run), () => factList(this.machine, machineOf(run)));
    drawOnce(this.settings, run.settings, () => drawSettings(this.settings, run));
  }

  x(run) {
    if (this.axis === "samples") return { label: "samples", kind: "count", tight: true };
    return { label: timeLabel(run), kind: "seconds", tight: true };
  }

  updateLearning(run) {
    const axis = this.axis;
    const marks = axis === "t" ? marksOf(run) : [];
    this.loss.update(lossSpec(run, axis, this.x(run), marks));
    this.accuracy.update(accuracySpec(run, axis, this.x(run), marks));
    this.classes.update(classSpec(run));
    this.updateReported(run, marks);
    this.norm.update(lineSpec(run.progress, "norm", axis, this.x(run), { label: "length of the weight vector", kind: "number" }));
    const factors = run.progress.step_factor || [];
    const factor = factors.some((one) => one !== null && one < 1);
    this.factor.update(factor ? lineSpec(run.progress, "step_factor", axis, this.x(run), { label: "factor of the step limit", kind: "number", zero: true }) : null);
    const rates = run.progress.lr || [];
    const moves = rates.some((one) => one !== rates[0]);
    this.rate.update(moves ? lineSpec(run.progress, "lr", axis, this.x(run), { label: "length of a step", kind: "number", zero: true }) : null);
    settle(this.learningGrid);
    this.learningBox.hidden = [...this.learningGrid.children].every((one) => one.hidden);
  }

  // A chart for each metric that an own loop reported more than once; they come before those of the server.
  updateReported(run, marks) {
    for (const name of Object.keys(run.reported)) {
      if (this.reported.has(name)) continue;
      const chart = new LineChart(this.learningGrid, name);
      this.learningGrid.insertBefore(chart.figure, this.norm.figure);
      this.reported.set(name, chart);
    }
    for (const [name, chart] of this.reported) chart.update(run.reported[name] ? reportedSpec(run, name, this.axis, this.x(run), marks) : null);
  }

  updatePace(run) {
    const time = { label: timeLabel(run), kind: "seconds", tight: true };
    const end = Math.max(run.figures.seconds || 0, ...run.timeline.lanes.flatMap((lane) => lane.here.map(([, to]) => to)));
    const alone = run.timeline.lanes.length === 1 && !run.timeline.lanes[0].segments.length; // one worker, always present
    const some = !alone && run.timeline.lanes.some((lane) => lane.here.length || lane.segments.length);
    const used = ["computing", "sending", "waiting", "server"].filter((part, place) =>
      run.timeline.lanes.some((lane) => lane.segments.some((one) => one[place + 2] > 0)));
    const gone = run.timeline.lanes.some((lane) => lane.here.length && (lane.here.length > 1 || lane.here[0][1] < end * 0.999));
    const legend = used.map((part) => [PART_NAMES[part], `background:var(--${part})`]);
    const told = Math.max(0, ...run.timeline.lanes.flatMap((lane) => lane.segments.map(([, until]) => until)));
    if (!used.length || told < end * 0.98) legend.push([used.length ? "present, use of time unknown" : "present", "background:var(--here)"]);
    const few = run.timeline.lanes.some((lane) => lane.segments.some((one) => one[6] > 0));
    if ((gone && !run.timeline.grouped) || few) legend.push([PART_NAMES.away, "background:repeating-linear-gradient(45deg,var(--away) 0 1.5px,transparent 1.5px 4px)"]);
    const summary = run.findings.join(". ");
    this.timeline.update(some && end > 0 ? { ...run.timeline, end, label: timeLabel(run), legend, summary } : null);
    setText(this.findings, run.findings.map((text) => text[0].toUpperCase() + text.slice(1)).join(". ") + (run.findings.length ? "." : ""));
    const unit = run.figures.unit || "samples";
    const speed = { x: run.rate.t, y: run.rate.rate, name: unit, colour: "var(--c0)", dots: 0 };
    const mean = run.figures.rate;
    this.speed.update(run.rate.t.length > 1 ? {
      x: time, y: { label: `${unit}/s`, kind: "rate", zero: true }, series: [speed], marks: marksOf(run),
      summary: known(mean) ? `${rateText(mean)} ${unit} a second on average` : "",
    } : null);
    const stale = run.figures.staleness;
    this.staleness.update(run.staleness.some(([low, , count]) => low > 0 && count > 0) ? {
      bars: run.staleness, label: "updates applied since its weights were sent",
      summary: stale ? `mean ${digits(stale.mean)}, median ${stale.p50}, 95 % at most ${stale.p95}, greatest ${stale.max}` : "",
    } : null);
    const bytes = bytesSpec(run, time);
    this.bytesBox.hidden = !bytes;
    setText(this.bytesName, `Bytes moved: ${movedOf(run.figures)}`);
    this.bytes.update(bytes);
    const live = run.progress.live || [];
    this.live.update(live.some((one) => one !== live[0]) ? {
      ...lineSpec(run.progress, "live", "t", time, { label: "workers", kind: "count", zero: true }, true), marks: marksOf(run),
    } : null);
    settle(this.paceGrid);
    this.workersBox.hidden = !run.workers.length;
    setText(this.workersCut, run.workers_left_out ? `${run.workers_left_out.toLocaleString("en-US")} more workers are not on this page: stragglers come first` : "");
    this.workers.update(run.workers.map((row) => ({ ...row, key: row.worker, className: row.slow ? "slow" : null })));
    this.pace.hidden = !some && !run.rate.t.length && !run.staleness.length;
  }
}

const WORKER_COLUMNS = [
  { name: "worker", title: "worker", number: true, value: (row) => row.worker },
  { name: "state", title: "state", value: (row) => row.state, cell: (row) => row.state + (row.slow ? `, slow: ${row.slow}` : "") },
  ...["computing", "sending", "waiting", "server"].map((part) => ({
    name: part, title: PART_NAMES[part], number: true, value: (row) => row.shares[part] ?? null,
    cell: (row) => (known(row.shares[part]) ? `${Math.round(100 * row.shares[part])} %` : "–"),
  })),
  { name: "step", title: "a step", number: true, value: (row) => row.step_seconds, cell: (row) => clock(row.step_seconds) },
  { name: "pushes", title: "pushes", number: true, value: (row) => row.pushes, cell: (row) => KINDS.count(row.pushes) },
  { name: "stale", title: "staleness", number: true, value: (row) => row.staleness, cell: (row) => digits(row.staleness) },
];

function timeLabel(run) {
  return run.figures.simulated || run.figures.lab ? "virtual time" : "training time";
}

function marksOf(run) {
  const listed = run.happenings.filter((one) => ["worker_lost", "run_resumed", "fault"].includes(one.kind));
  return listed.slice(0, 40).map((one) => ({ x: one.t, text: `${clock(one.t)}: ${one.text}` }));
}

const FINAL = ["test", "validation", "train"].flatMap((part) => [`${part}_accuracy`, `${part}_loss`]);

// Return what the figures belong to: the run's name, its workers, the applied rule and the scored weights.
function aboutOf(run) {
  const { figures, settings } = run;
  const rule = figures.rule || (settings.rule === "auto" ? null : settings.rule);
  const chosen = settings.rule === "auto" && figures.rule ? ", chosen by auto" : "";
  return [
    `run ${run.name}`, known(figures.workers) ? `${figures.workers} ${figures.workers === 1 ? "worker" : "workers"}` : null,
    rule ? `rule ${rule}${chosen}` : settings.rule ? "rule auto" : null, FINAL.some((name) => known(figures[name])) ? `scored: ${figures.weights} weights` : null,
  ].filter(Boolean).join(" · ");
}

function tilesOf(run) {
  const { figures } = run;
  const stale = figures.staleness;
  return [
    ...[...WEIGHTS].sort((kind) => (kind === figures.weights ? -1 : 1)).flatMap((kind) => [["test", "accuracy"], ["test", "loss"], ["validation", "accuracy"], ["train", "accuracy"]].map(([part, what]) => {
      const value = figures[`${kind}_${part}_${what}`];
      return [`${part} ${what}, ${kind} weights`, known(value) ? (what === "loss" ? digits(value, 4) : KINDS.percent(value)) : null];
    })),
    ...Object.entries(figures.metrics).map(([name, value]) => [`${name}, reported`, known(value) ? digits(value, 4) : "not finite"]),
    [timeLabel(run), known(figures.seconds) ? clock(figures.seconds) : null],
    ["time left, about", known(figures.seconds_left) ? clock(figures.seconds_left) : null],
    [`${figures.unit || "samples"}/s`, known(figures.rate) ? rateText(figures.rate) : null],
    ["updates", known(figures.updates) ? KINDS.count(figures.updates) : null],
    ["staleness, mean", stale && stale.max ? digits(stale.mean) : null],
    ["workers lost", figures.lost_workers ? String(figures.lost_workers) : null],
    ["resumed", figures.resumes ? `${figures.resumes} ×` : null],
  ];
}

function machineOf(run) {
  const { machine, figures } = run;
  const git = run.git ? run.git.commit.slice(0, 12) + (run.git.changed ? ", changed" : "") : null;
  return [
    ["processor", machine.cpu ? `${machine.cpu}, ${machine.cores} cores` : null], ["system", machine.system],
    ["python", machine.python], ["torch", machine.torch], ["numpy", machine.numpy], ["paceline", machine.paceline],
    ["git", git], ["made", run.made], ["data", run.data_origin],
    ["parameters", known(figures.num_parameters) ? KINDS.count(figures.num_parameters) : null],
    ["weights", run.weights_sha256 ? `sha256 ${run.weights_sha256.slice(0, 16)}…` : null], ["folder", run.id],
  ];
}

function movedOf(figures) {
  if (!known(figures.bytes_pushed)) return null;
  return figures.bytes_pushed ? `${KINDS.bytes(figures.bytes_pushed)} pushed, ${KINDS.bytes(figures.bytes_pulled)} pulled` : "none";
}

function drawSettings(parent, run) {
  const groups = new Map();
  for (const [name, value] of Object.entries(run.settings)) {
    const preset = settingText(facts.defaults[name]);
    const changed = settingText(value) !== preset;
    if (value === null) continue; // not set, or decided by a script
    if (run.settings.task && (name === "dataset" || name === "model")) continue; // the task has its own
    const group = facts.groups[name] || "other";
    if (!groups.has(group)) groups.set(group, []);
    const term = el("dt", { title: facts.help[name] || null, class: changed ? "changed" : null }, flagOf(name));
    groups.get(group).push(term, el("dd", { class: changed ? "changed" : null }, settingText(value)));
  }
  parent.replaceChildren(...[...groups].map(([name, rows]) => el("div", {}, el("h4", {}, name), el("dl", { class: "facts" }, ...rows))));
}
