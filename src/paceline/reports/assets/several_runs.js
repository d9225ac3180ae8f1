// Several runs side by side: a table, curves, scaling, classes, and differing settings.

const METRICS = [...["test", "validation"].flatMap((part) => ["accuracy", "loss"].flatMap((what) => WEIGHTS.map((kind) => [`${kind}_${part}_${what}`, `${part} ${what}, ${kind}`]))),
  ["train", "train loss of pushes"]];
const FAILED = ["diverged", "collapsed"];
const NOT_SETTINGS = new Set(["name", "runs", "data_dir", "threads", "checkpoint_every", "keep"]);

class SeveralRuns {
  constructor(top, parent, choose) {
    this.hidden = new Set();
    this.choose = choose;
    this.verdict = el("p", { class: "verdict" });
    this.notes = el("ul", { class: "notes", hidden: true });
    top.append(this.verdict, this.notes);
    const all = section(top, "All runs", "all-runs");
    this.table = new SortedTable(all, [], { caption: "Runs", falling: true });
    const curves = section(parent, "Training curves", "curves");
    this.metric = new Choice(curves, "what is drawn", METRICS, () => this.update(this.runs));
    const grid = el("div", { class: "grid" });
    curves.append(grid);
    this.overTime = new LineChart(grid, "Over time", { height: 280 });
    this.overSamples = new LineChart(grid, "Over samples", { height: 280 });
    const more = section(parent, "Comparison", "comparison");
    const pair = this.pair = el("div", { class: "grid" });
    more.append(pair);
    this.scaling = new LineChart(pair, "Scaling", { height: 260 });
    this.classes = new Rows(pair, "Test accuracy by class");
    this.more = more;
    this.changed = section(parent, "Differing settings", "differs");
    this.changedList = el("dl", { class: "differs" });
    this.changed.append(this.changedList);
    this.chosen = false;
  }

  update(runs) {
    this.runs = runs;
    if (!this.chosen) this.firstMetric(runs);
    this.metric.offer((name) => name === "train" || runs.some((run) => curveOf(run, name).filter(known).length > 1));
    setText(this.verdict, overall(runs));
    const notes = runs.flatMap((run) => run.notes.map((text) => `${run.name}: ${text}`));
    this.notes.hidden = !notes.length;
    const shown = notes.slice(0, 12);
    if (notes.length > shown.length) shown.push(`and ${notes.length - shown.length} more notes; each run's own are below`);
    this.notes.replaceChildren(...shown.map((text) => el("li", {}, text)));
    const differing = differences(runs);
    this.updateTable(runs, differing);
    const seen = runs.map((run, number) => ({ run, number })).filter(({ run }) => !this.hidden.has(run.id));
    const labels = [...new Set(runs.map(timeLabel))];
    const label = labels.length > 1 ? "training or virtual time" : labels[0];
    this.overTime.update(curvesSpec(seen, this.metric.value, "t", { label, kind: "seconds", tight: true }));
    this.overSamples.update(curvesSpec(seen, this.metric.value, "samples", { label: "samples", kind: "count", tight: true }));
    this.scaling.update(scalingSpec(runs));
    this.classes.update(classesSpec(seen));
    settle(this.pair);
    this.more.hidden = this.scaling.figure.hidden && this.classes.figure.hidden;
    this.changed.hidden = !differing.length;
    this.changedList.replaceChildren(...differing.map(([name, groups]) => el("div", {},
      el("dt", { title: facts.help[name] || null }, name.replaceAll("_", "-")),
      el("dd", {}, ...valuesOf(groups, runs)))));
  }

  // Return the first metric for which any run has a curve.
  firstMetric(runs) {
    this.chosen = true;
    const has = (name) => runs.some((run) => curveOf(run, name).filter(known).length > 1);
    const compared = ["test", "validation"].flatMap((part) => ["accuracy", "loss"].map((what) => `${comparable(runs, `${part}_${what}`)}_${part}_${what}`));
    const names = [...compared, ...METRICS.map(([name]) => name)].filter((name) => name !== "train" && has(name));
    this.metric.set(names[0] || "train");
  }

  updateTable(runs, differing) {
    const named = differing.filter(([name]) => name !== "workers").slice(0, 6).map(([name]) => name);
    const kind = comparable(runs, "test_accuracy");
    if (!facts.live && !this.table.sort.by && kind) this.table.sort = { by: `${kind}_test_accuracy`, falling: true };
    const rows = runs.map((run, number) => ({ run, number, key: run.id, state: this.hidden.has(run.id), className: this.hidden.has(run.id) ? "off" : null }));
    const columns = [
      { name: "run", title: "run", value: (row) => row.run.name, cell: (row) => this.nameCell(row) },
      { name: "status", title: "status", value: (row) => row.run.status, cell: (row) => badge(row.run) },
      measured("workers", "workers", (figures) => figures.workers, KINDS.count),
      ...[["test_accuracy", "test %", 2], ["train_accuracy", "train %", 2], ["test_loss", "test loss", 4]].flatMap(([name, title, places]) =>
        WEIGHTS.map((of) => measured(`${of}_${name}`, `${title}, ${of === "live" ? of : "avg"}`, (figures) => figures[`${of}_${name}`],
          (value) => (known(value) ? value.toFixed(places) : "–")))),
      ...[...new Set(runs.flatMap((run) => Object.keys(run.figures.metrics)))].map((name) =>
        measured(`metric-${name}`, name, (figures) => figures.metrics[name], (value) => digits(value, 4))),
      measured("seconds", "time", (figures) => figures.seconds, clock),
      measured("rate", "samples/s", (figures) => figures.rate, (value) => digits(value, 4)),
      measured("stale", "staleness", (figures) => figures.staleness?.mean, digits),
      measured("bytes", "moved", (figures) => (figures.bytes_pushed || 0) + (figures.bytes_pulled || 0) || null, (value) => short(value, "B")),
      ...named.map((name) => ({ name: `set-${name}`, title: name.replaceAll("_", "-"), help: facts.help[name],
        number: runs.every((run) => known(run.settings[name]) || (run.settings[name] ?? null) === null),
        value: (row) => (known(row.run.settings[name]) ? row.run.settings[name] : settingText(row.run.settings[name])),
        cell: (row) => settingText(row.run.settings[name]) })),
    ];
    this.table.update(rows, columns.filter((one) => !one.number || rows.some((row) => one.value(row) !== null)));
  }

  nameCell({ run, number }) {
    const on = !this.hidden.has(run.id);
    const swatch = el("button", { type: "button", class: "swatch key", "aria-pressed": String(on), "aria-label": `show ${run.name} in the charts`,
      style: `--key:${colourOf(number)};--dash:${dashOf(number) ? "dashed" : "solid"}`, onclick: () => {
        if (on) this.hidden.add(run.id);
        else this.hidden.delete(run.id);
        this.update(this.runs);
      } });
    const link = el("a", { href: `#${encodeURIComponent(run.name)}`, onclick: () => this.choose(run.name) }, run.name);
    return el("span", { class: "name" }, swatch, link);
  }
}

// Return each value with its runs; if there are many values, only the values.
function valuesOf(groups, runs) {
  if (groups.size <= 8) {
    return [...groups].map(([value, members]) => el("div", {}, el("b", {}, value), ` ${namesOf(members, runs)}`));
  }
  const values = [...groups.keys()].sort((a, b) => order(a, b, false));
  return [el("b", {}, `${values[0]}, ${values[1]}, … ${values.at(-1)}`), ` ${values.length} values`];
}

function namesOf(members, runs) {
  if (2 * members.length > runs.length && members.length > 3) return `${members.length} runs`;
  return members.map((one) => one.name).join(", ");
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
  const sentences = [`${runs.length} runs: ${how}.`];
  const [best, kind, part] = bestOf(runs);
  if (best) {
    const accuracy = KINDS.percent(best.figures[`${kind}_${part}_accuracy`]);
    const chosen = part === "test" ? ", chosen on the test set" : "";
    sentences.push(`Best is ${best.name} with ${accuracy} ${part} accuracy (${kind} weights) in ${clock(best.figures.seconds)}${chosen}.`);
  } else if (runs.some((run) => known(run.figures.test_accuracy))) {
    sentences.push("No best run: some were scored on live weights only, others on averaged weights only.");
  }
  const timed = runs.filter((run) => known(run.figures.rate) && !run.figures.simulated && !run.figures.lab);
  if (new Set(timed.map((run) => run.figures.rate)).size > 1) {
    const fast = timed.reduce((a, b) => (b.figures.rate > a.figures.rate ? b : a));
    sentences.push(`Fastest is ${fast.name} with ${digits(fast.figures.rate, 4)} samples/s.`);
  }
  return sentences.join(" ");
}

// Return the kind of weights that all scored runs have a score for; null if there is none.
function comparable(runs, name) {
  const scored = runs.filter((run) => known(run.figures[name]));
  const kinds = [...new Set(scored.map((run) => run.figures.weights))];
  return (kinds.length === 1 ? kinds : WEIGHTS).find((kind) => scored.every((run) => known(run.figures[`${kind}_${name}`]))) || null;
}

// Return the run with the highest accuracy, the kind of weights and the data it was compared on, of runs that trained to the end.
// They are compared on validation data if all have some.
function bestOf(runs) {
  const scored = runs.filter((run) => known(run.figures.test_accuracy) && !FAILED.includes(run.status));
  for (const part of ["validation", "test"]) {
    const kind = comparable(scored, `${part}_accuracy`);
    const name = `${kind}_${part}_accuracy`;
    if (scored.length && kind && scored.every((run) => known(run.figures[name]))) return [scored.reduce((a, b) => (b.figures[name] > a.figures[name] ? b : a)), kind, part];
  }
  return [null, null, null];
}

// Return the evaluations of a run on one kind of weights, as in live_test_loss; empty if there were none.
function curveOf(run, metric) {
  const kind = run.figures.weights;
  return run.scores[metric.startsWith(`${kind}_`) ? metric.slice(kind.length + 1) : metric] || [];
}

// Return each setting that differs: its values, and the runs that have them.
function differences(runs) {
  const found = [];
  for (const name of Object.keys(facts.groups)) {
    if (NOT_SETTINGS.has(name)) continue;
    const groups = new Map();
    for (const run of runs) {
      if (!Object.keys(run.settings).length) continue;
      const value = settingText(run.settings[name]);
      if (!groups.has(value)) groups.set(value, []);
      groups.get(value).push(run);
    }
    if (groups.size > 1) found.push([name, groups]);
  }
  return found;
}

function curvesSpec(seen, metric, axis, x) {
  const series = [];
  for (const { run, number } of seen) {
    const { course, scores } = run;
    const look = { name: run.name, colour: colourOf(number), dash: dashOf(number) };
    if (metric === "train") {
      if (course.t.length) series.push({ ...look, x: course[axis], y: smooth(course.loss, course.count), dots: 1 });
    } else if (curveOf(run, metric).some(known)) series.push({ ...look, x: scores[axis], y: curveOf(run, metric) });
  }
  if (!series.length) return null;
  const percent = metric.endsWith("accuracy");
  const y = { label: METRICS.find(([name]) => name === metric)[1], kind: percent ? "percent" : "number" };
  if (percent) Object.assign(y, { floor: 0, ceiling: 100 });
  else Object.assign(y, { zero: true });
  const legend = series.length <= 10 ? series.map((one) => [one.name, stroke(one.colour, one.dash)]) : [];
  return { x, y, series, legend, summary: `${series.length} runs` };
}

const ALIKE = new Set([...NOT_SETTINGS, "workers", "seed", "batch_size", "lr", "shard_weights", "max_workers"]);

// Samples per second by number of workers; one line per combination of the other settings.
function scalingSpec(runs) {
  const lines = new Map();
  for (const run of runs) {
    const { rate, workers } = run.figures;
    if (!known(rate) || !known(workers) || FAILED.includes(run.status)) continue;
    const kind = JSON.stringify(Object.entries(run.settings).filter(([name]) => !ALIKE.has(name)));
    if (!lines.has(kind)) lines.set(kind, { name: `${run.settings.strategy}, ${run.settings.task || run.settings.model}`, line: new Map() });
    const { line } = lines.get(kind);
    line.set(workers, [...(line.get(workers) || []), rate]);
  }
  const kept = [...lines.values()].filter(({ line }) => line.size > 1);
  if (!kept.length) return null;
  const series = kept.map(({ name, line }, number) => {
    const sizes = [...line.keys()].sort((a, b) => a - b);
    const mean = sizes.map((size) => line.get(size).reduce((sum, one) => sum + one, 0) / line.get(size).length);
    return { name, x: sizes, y: mean, colour: colourOf(number), dash: dashOf(number) };
  });
  const ideal = series.map((one) => ({ ...one, name: `${one.name}, ideal`, y: one.x.map((size) => (one.y[0] * size) / one.x[0]), dash: "2 4", dots: 0, faint: true }));
  const legend = [...series.map((one) => [one.name, stroke(one.colour, one.dash)]), ["ideal: linear speedup", stroke("currentColor", "2 4")]];
  return { x: { label: "workers", kind: "count", tight: true }, y: { label: "samples/s", kind: "rate", zero: true }, series: [...ideal, ...series], legend, exact: true };
}

function classesSpec(seen) {
  const all = seen.filter(({ run }) => run.per_class.some(([, value]) => known(value)));
  const groups = WEIGHTS.map((kind) => all.filter(({ run }) => run.figures.weights === kind));
  const [scored, others] = groups[1].length > groups[0].length ? [groups[1], groups[0]] : groups;
  const names = [...new Set(scored.flatMap(({ run }) => run.per_class.map(([name]) => name)))];
  if (!scored.length || names.length > 200) return null;
  const tables = scored.map(({ run }) => new Map(run.per_class));
  const rows = names.map((name) => ({ name, values: tables.map((table) => table.get(name) ?? null) }));
  const low = (row) => Math.min(...row.values.filter(known));
  const shown = rows.length > 20 ? rows.sort((a, b) => low(a) - low(b)).slice(0, 20) : rows;
  const look = scored.map(({ number }) => colourOf(number));
  const captions = [`${scored[0].run.figures.weights} weights`];
  if (others.length) captions.push(`not shown: ${others.map(({ run }) => run.name).slice(0, 3).join(", ")}${others.length > 3 ? ", …" : ""}, scored on ${others[0].run.figures.weights} weights`);
  if (rows.length > 20) captions.push(`the 20 lowest of ${rows.length} classes`);
  return { rows: shown, single: false, colours: look, names: scored.map(({ run }) => run.name), label: "accuracy (%)",
    caption: captions.join("; "), summary: `${scored.length} runs`,
    legend: scored.length <= 10 ? scored.map(({ run }, place) => [run.name, `background:${look[place]}`]) : [] };
}
