// Several runs side by side: a table, and for each data set curves, scaling and classes.

const SCORED = ["test", "validation"].flatMap((part) => ["accuracy", "loss"].flatMap((what) => WEIGHTS.map((kind) => [`${kind}_${part}_${what}`, `${part} ${what}, ${kind}`])));
const TRAIN = ["train", "train loss of pushes"];
const MAX_CHOSEN = COLOURS;
const MAX_ROWS = 15;
const MAX_METRICS = 3; // columns of reported metrics
const MAX_SETTINGS = 4; // columns of differing settings
const MAX_TIED = 3; // runs that share the best score and are named

class SeveralRuns {
  constructor(top, parent, choose) {
    this.switched = new Map();
    this.groups = new Map();
    this.choose = choose;
    this.verdict = el("p", { class: "verdict" });
    this.notes = el("ul", { class: "notes", hidden: true });
    top.append(this.verdict, this.notes);
    const all = section(top, "All runs", "all-runs");
    this.table = new SortedTable(all, [], { caption: "Runs", falling: true, most: MAX_ROWS });
    this.others = el("p", { class: "findings" });
    all.append(this.others);
    const curves = section(parent, "Training curves", "curves");
    this.hint = el("p", { class: "findings hint" });
    curves.append(this.hint);
    this.metric = new Choice(curves, "what is drawn", [], () => this.update(this.runs));
    this.box = el("div");
    curves.append(this.box);
    this.changed = section(parent, "Differing settings", "differs");
    this.changedList = el("dl", { class: "differs" });
    this.changed.append(this.changedList);
    this.chosen = false;
  }

  update(runs) {
    this.runs = runs;
    const first = this.chosen ? null : firstMetric(groupsOf(runs)[0][1]);
    if (first) this.metric.set(first);
    this.chosen ||= Boolean(first);
    this.metric.offer(metricsOf(runs).filter(([name]) => hasCurve(runs, name)));
    setText(this.verdict, overall(runs));
    const notes = notesOf(runs);
    this.notes.hidden = !notes.length;
    const shown = notes.slice(0, 12);
    if (notes.length > shown.length) shown.push(`and ${notes.length - shown.length} more notes; each run's own are below`);
    this.notes.replaceChildren(...shown.map((text) => el("li", {}, text)));
    const differing = differences(runs);
    this.look(runs);
    this.updateTable(runs, differing);
    this.updateGroups(groupsOf(runs));
    this.changed.hidden = !differing.length;
    this.changedList.replaceChildren(...differing.map(([name, groups]) => el("div", {},
      el("dt", { title: facts.help[name] || null }, flagOf(name)),
      el("dd", {}, ...valuesOf(groups, runs)))));
  }

  // Decide which runs have a colour: all of a few; of many, the best ones and some across the rest.
  look(runs) {
    this.coloured = new Set();
    for (const [, members] of groupsOf(runs)) for (const run of chosenOf(members)) this.coloured.add(run.id);
    for (const [id, on] of this.switched) this.coloured[on ? "add" : "delete"](id);
    const many = this.many = runs.length > MANY;
    this.numbers = new Map(runs.filter((run) => !many || this.coloured.has(run.id)).map((run, number) => [run.id, number]));
    const count = runs.filter((run) => this.coloured.has(run.id)).length;
    const text = many ? `${count} of ${runs.length} runs have a colour in the charts, the others are grey.` : "";
    const all = el("button", { type: "button", class: "plain", onclick: () => this.switchAll(true) }, "colour all");
    const none = el("button", { type: "button", class: "plain", onclick: () => this.switchAll(false) }, "none");
    const preset = el("button", { type: "button", class: "plain", onclick: () => { this.switched.clear(); this.update(this.runs); } }, "best and some of the rest");
    drawOnce(this.hint, [text], () => this.hint.replaceChildren(...(many ? [`${text} Click a line sample in the table of all runs to change that, or: `, all, ", ", none, ", ", preset, "."] : [])));
    this.hint.hidden = !many;
  }

  switchAll(on) {
    for (const run of this.runs) this.switched.set(run.id, on);
    this.update(this.runs);
  }

  updateGroups(groups) {
    for (const [name, members] of groups) {
      if (!this.groups.has(name)) this.groups.set(name, new ComparedGroup(this.box));
      this.groups.get(name).update(groups.length > 1 ? name : "", members, this);
    }
    for (const [name, group] of this.groups) group.box.hidden = !groups.some(([one]) => one === name);
  }

  updateTable(runs, differing) {
    const telling = tellingSettings(runs, differing.map(([name]) => name));
    const named = telling.slice(0, MAX_SETTINGS);
    const others = differing.map(([name]) => name).filter((name) => !named.includes(name));
    setText(this.others, others.length ? `Listed under “Differing settings”: ${others.map(flagOf).join(", ")}.` : "");
    const groups = groupsOf(runs);
    const score = `test_${scoreOf(runs)}`;
    const kind = comparable(runs, score);
    if (!facts.live && !this.table.sort.by && kind && groups.length === 1) this.table.sort = { by: `${kind}_${score}`, falling: score === "test_accuracy" };
    const listed = groups.length > 1 && !facts.live ? groups.flatMap(([, members]) => fromTheBest(members)) : runs;
    const rows = listed.map((run) => ({ run, key: run.id, state: [this.coloured.has(run.id), this.numbers.get(run.id)], className: this.coloured.has(run.id) || this.many ? null : "off" }));
    const accuracies = [...scoreColumns("validation_accuracy", "valid. %", percentCell), ...scoreColumns("test_accuracy", "test %", percentCell)];
    // Of live and averaged weights, those come first that all scored runs have.
    const shared = (column) => {
      const [weights, score] = column.split(/_(.*)/);
      const common = comparable(runs, score);
      return common === null || common === weights;
    };
    const columns = [
      { name: "run", title: "run", value: (row) => row.run.short, cell: (row) => this.nameCell(row) },
      ...named.map((name) => settingColumn(name, runs)),
      ...(facts.live || new Set(runs.map((run) => run.status)).size > 1 ? [{ name: "status", title: "status", value: (row) => row.run.status, cell: (row) => badge(row.run) }] : []),
      ...[...new Set(runs.flatMap((run) => Object.keys(run.figures.metrics)))].slice(0, MAX_METRICS).map((name) =>
        measured(`metric-${name}`, `${name}, reported`, (figures) => figures.metrics[name], (value) => digits(value, 4))),
      ...accuracies.filter(({ name }) => shared(name)),
      measured("seconds", "time", (figures) => figures.seconds, clock),
      measured("rate", "samples/s", (figures) => figures.rate, rateText),
      ...accuracies.filter(({ name }) => !shared(name)),
      ...scoreColumns("test_loss", "test loss", (value) => digits(value, 4)), ...scoreColumns("train_accuracy", "train %", percentCell),
      measured("stale", "staleness", (figures) => figures.staleness?.mean, digits),
      measured("bytes", "moved", (figures) => (known(figures.bytes_pushed) ? figures.bytes_pushed + (figures.bytes_pulled || 0) : null), (value) => short(value, "B")),
    ];
    this.table.update(rows, columns.filter((one) => !one.number || one.name.startsWith("set-") || rows.some((row) => one.value(row) !== null)));
  }

  nameCell({ run }) {
    const on = this.coloured.has(run.id);
    const number = this.numbers.get(run.id) ?? 0;
    const swatch = el("button", { type: "button", class: "swatch key", "aria-pressed": String(on), "aria-label": `show ${run.name} in the charts`,
      style: `--key:${colourOf(number)};--dash:${dashOf(number) ? "dashed" : "solid"}`, onclick: () => {
        this.switched.set(run.id, !on);
        this.update(this.runs);
      } });
    const link = el("a", { href: `#${encodeURIComponent(run.name)}`, title: `${run.name}: ${run.title || ""}`, onclick: () => this.choose(run.name) }, run.short);
    return el("span", { class: "name" }, swatch, link);
  }
}

// Return the notes of all runs; one that several share is said once.
function notesOf(runs) {
  const sharing = new Map();
  for (const run of runs) for (const text of run.notes) sharing.set(text, [...(sharing.get(text) || []), run.short]);
  return [...sharing].map(([text, names]) => `${names.length > 2 ? `${names.length} runs` : names.join(" and ")}: ${text}`);
}

// The charts of the runs on one data set.
class ComparedGroup {
  constructor(parent) {
    this.heading = el("h3", { class: "group" });
    this.empty = el("p", { class: "findings" }, "No curves: neither a loss nor an evaluation was recorded while training.");
    this.grid = el("div", { class: "grid" });
    this.box = el("div", { class: "compared" }, this.heading, this.empty, this.grid);
    parent.append(this.box);
    this.overTime = new LineChart(this.grid, "Over time", { height: 280 });
    this.overSamples = new LineChart(this.grid, "Over samples", { height: 280 });
    this.scaling = new LineChart(this.grid, "Scaling", { height: 260 });
    this.classes = new Rows(this.grid, "Test accuracy by class");
  }

  update(name, runs, { coloured, numbers, metric, many }) {
    const count = runs.length === 1 ? "1 run" : `${runs.length} runs`;
    setText(this.heading, name ? `${name}: ${count}` : "");
    const seen = runs.map((run) => ({ run, number: numbers.get(run.id) ?? 0, on: coloured.has(run.id) }));
    const drawn = seen.filter(({ on }) => on || many);
    const labels = [...new Set(runs.map(timeLabel))];
    const label = labels.length > 1 ? "training or virtual time" : labels[0];
    const value = metric.value && hasCurve(runs, metric.value) ? metric.value : firstMetric(runs);
    this.overTime.update(value ? curvesSpec(drawn, value, "t", { label, kind: "seconds", tight: true }) : null);
    this.overSamples.update(value ? curvesSpec(drawn, value, "samples", { label: "samples", kind: "count", tight: true }) : null);
    this.scaling.update(scalingSpec(runs));
    this.classes.update(classesSpec(seen.filter(({ on }) => on)));
    settle(this.grid);
    this.heading.hidden = !name;
    this.empty.hidden = [...this.grid.children].some((one) => !one.hidden);
  }
}

// Return name and text of each metric that can be drawn.
function metricsOf(runs) {
  const reported = [...new Set(runs.flatMap((run) => Object.keys(run.reported)))];
  return [...SCORED, ...reported.map((name) => [REPORTED + name, `${name}, reported`]), TRAIN];
}

function hasCurve(runs, name) {
  return runs.some((run) => curveOf(run, name).y.filter(known).length > 1);
}

// Return the first metric for which most runs have a curve, one that all runs can be compared by if there is one.
function firstMetric(runs) {
  const compared = ["test", "validation"].flatMap((part) => ["accuracy", "loss"].map((what) => `${comparable(runs, `${part}_${what}`)}_${part}_${what}`));
  const names = [...compared, ...metricsOf(runs).map(([name]) => name)];
  return names.find((name) => 2 * runs.filter((run) => hasCurve([run], name)).length > runs.length) || names.find((name) => hasCurve(runs, name));
}

// Return the runs of a data set that have a colour at first.
function chosenOf(runs) {
  if (runs.length <= MANY) return runs;
  const listed = fromTheBest(runs);
  const best = Math.ceil(MAX_CHOSEN / 2);
  const step = (listed.length - 1 - best) / (MAX_CHOSEN - best - 1);
  const others = Array.from({ length: MAX_CHOSEN - best }, (_, place) => listed[Math.round(best + place * step)]);
  return [...listed.slice(0, best), ...others];
}

function settingColumn(name, runs) {
  const value = (row) => settingOf(row.run, name);
  const cell = name === "rule" ? shortRule(runs) : settingText;
  return { name: `set-${name}`, title: flagOf(name), help: facts.help[name],
    number: runs.every((run) => known(settingOf(run, name)) || (settingOf(run, name) ?? null) === null),
    value: (row) => (known(value(row)) ? value(row) : settingText(value(row))), cell: (row) => cell(value(row)) };
}

// Return how to write a rule in a cell: without what is in parentheses, unless runs differ in nothing else.
function shortRule(runs) {
  const short = (value) => settingText(value).split(" (")[0];
  const count = (write) => new Set(runs.map((run) => write(settingOf(run, "rule")))).size;
  return count(short) === count(settingText) ? short : settingText;
}

// Return a column for each kind of weights.
function scoreColumns(name, title, show) {
  return WEIGHTS.map((of) => measured(`${of}_${name}`, `${title}, ${of === "live" ? of : "avg"}`, (figures) => figures[`${of}_${name}`], show));
}

function percentCell(value) {
  return known(value) ? value.toFixed(2) : "–";
}

function measured(name, title, pick, show) {
  const value = (row) => pick(row.run.figures) ?? null;
  return { name, title, number: true, value, cell: (row) => show(value(row)) };
}

function badge(run) {
  return el("span", { class: `badge ${run.status}` }, run.status);
}

function overall(runs) {
  const counts = new Map();
  for (const run of runs) counts.set(run.status, (counts.get(run.status) || 0) + 1);
  const how = [...counts].map(([status, count]) => `${count} ${status}`).join(", ");
  const groups = groupsOf(runs);
  const sentences = [`${runs.length} runs: ${how}.`, ...groups.filter(([, members]) => members.length > 1).map(([name, members]) => bestSentence(members, groups.length > 1 ? ` on ${name}` : ""))];
  const timed = runs.filter((run) => known(run.figures.rate) && !FAILED.includes(run.status) && !run.figures.simulated && !run.figures.lab);
  if (groups.length === 1 && new Set(timed.map((run) => run.figures.rate)).size > 1) {
    const fast = timed.reduce((a, b) => (b.figures.rate > a.figures.rate ? b : a));
    sentences.push(`Fastest is ${fast.short} with ${rateText(fast.figures.rate)} samples/s.`);
  }
  return sentences.filter(Boolean).join(" ");
}

// Return names as a list in a sentence; of many the first ones.
function listOf(names) {
  if (names.length > MAX_TIED) return `${names.slice(0, MAX_TIED).join(", ")} and ${names.length - MAX_TIED} more`;
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
}

function bestSentence(runs, where) {
  const ranking = rankingOf(runs);
  const [best, ...others] = ranked(runs, ranking);
  if (best) {
    const tied = [best, ...others.filter((run) => ranking.text(run) === ranking.text(best))];
    const chosen = ranking.part === "test" ? ", chosen on the test set" : "";
    const time = tied.length === 1 && known(best.figures.seconds) ? ` in ${clock(best.figures.seconds)} of ${timeLabel(best) === "virtual time" ? "virtual time" : "training"}` : "";
    return `Best${where} ${tied.length === 1 ? "is" : "are"} ${listOf(tied.map((run) => run.short))} with ${ranking.text(best)}${time}${chosen}.`;
  }
  return rankable(runs).some((run) => known(run.figures[`test_${scoreOf(runs)}`])) ? `No best run${where}: some were scored on live weights only, others on averaged weights only.` : "";
}
