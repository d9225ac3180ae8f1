// Chart specifications of several runs.

const REPORTED = "reported:"; // before the name of a metric of an own loop

// Return a metric in the course of a run as {t, samples, y}: what its script reported, the loss of its pushes, or the
// evaluations on one kind of weights, as in live_test_loss. y is empty if there were none.
function curveOf(run, metric) {
  const kind = run.figures.weights;
  if (metric.startsWith(REPORTED)) {
    const found = run.reported[metric.slice(REPORTED.length)];
    return { ...found, y: found?.value || [] };
  }
  if (metric === "train") return { ...run.course, y: run.course.loss };
  return { ...run.scores, y: run.scores[metric.startsWith(`${kind}_`) ? metric.slice(kind.length + 1) : metric] || [] };
}

function curvesSpec(seen, metric, axis, x) {
  const series = [];
  for (const { run, number, on } of [...seen].sort((a, b) => a.on - b.on)) {
    const curve = curveOf(run, metric);
    if (!curve.y.some(known)) continue;
    const look = { name: run.short, failed: FAILED.includes(run.status), colour: on ? colourOf(number) : "var(--grey)", dash: on ? dashOf(number) : "", grey: !on };
    if (metric === "train") series.push({ ...look, x: curve[axis], y: smooth(curve.y, curve.count), dots: on ? 1 : 0 });
    else series.push({ ...look, x: curve[axis], y: curve.y, dots: on ? 24 : 1 });
  }
  if (!series.length) return null;
  const reported = metric.startsWith(REPORTED);
  const percent = !reported && metric.endsWith("accuracy");
  const y = { label: metricsOf(seen.map(({ run }) => run)).find(([name]) => name === metric)[1], kind: percent ? "percent" : "number" };
  if (percent) Object.assign(y, { floor: 0, ceiling: 100 });
  else if (!reported || isLoss(metric)) Object.assign(y, { ...logScale(series.flatMap((one) => one.y)), cap: capOf(series) });
  const coloured = series.filter((one) => !one.grey);
  const legend = coloured.length <= MANY ? coloured.map((one) => [one.name, stroke(one.colour, one.dash)]) : [];
  if (coloured.length < series.length) legend.push([`${series.length - coloured.length} more`, stroke("var(--grey)")]);
  const counts = series.map((one) => one.y.filter(known).length);
  const note = Math.min(...counts) === 1 && Math.max(...counts) > 1 ? "; a dot: scored only at the end on these weights" : "";
  const over = series.filter((one) => greatest(one.y) > y.cap).map((one) => one.name);
  const left = over.length ? `; beyond the axis: ${over.length > 4 ? `${over.length} runs` : over.join(", ")}` : "";
  return { x, y, series, legend, note: note + left, summary: `${series.length} runs` };
}

const MAX_ABOVE = 5; // the axis ends at so many times the greatest value of the runs that did not explode

function greatest(values) {
  return values.reduce((most, value) => (known(value) && value > most ? value : most), -Infinity);
}

// Return where the axis of several losses ends, so that an exploded run does not flatten the others.
function capOf(series) {
  const calm = series.filter((one) => !one.failed && greatest(one.y) <= explodedFrom(one.y));
  return calm.length && calm.length < series.length ? MAX_ABOVE * greatest(calm.flatMap((one) => one.y)) : Infinity;
}

const ALIKE = new Set(["workers", "threads", "warmup", "seed", "batch_size", "lr", "shard_weights", "max_workers"]);

// Samples per second by number of workers; one line per combination of the other settings.
function scalingSpec(runs) {
  const lines = new Map();
  for (const run of runs) {
    const { rate, workers } = run.figures;
    if (!known(rate) || !known(workers) || FAILED.includes(run.status)) continue;
    const kind = JSON.stringify(Object.entries(run.settings).filter(([name]) => name in run.compared && !ALIKE.has(name)));
    if (!lines.has(kind)) lines.set(kind, { name: `${run.strategy}, ${run.model}`, line: new Map() });
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
  const all = seen.filter(({ run }) => !FAILED.includes(run.status) && run.per_class.some(([, value]) => known(value)));
  const groups = WEIGHTS.map((kind) => all.filter(({ run }) => run.figures.weights === kind));
  const [most, others] = groups[1].length > groups[0].length ? [groups[1], groups[0]] : groups;
  const best = fromTheBest(most.map(({ run }) => run)).slice(0, MANY);
  const scored = most.filter(({ run }) => best.includes(run));
  const names = [...new Set(scored.flatMap(({ run }) => run.per_class.map(([name]) => name)))];
  if (!scored.length || names.length > 200) return null;
  const tables = scored.map(({ run }) => new Map(run.per_class));
  const rows = names.map((name) => ({ name, values: tables.map((table) => table.get(name) ?? null) }));
  const low = (row) => Math.min(...row.values.filter(known));
  const shown = rows.length > 20 ? rows.sort((a, b) => low(a) - low(b)).slice(0, 20) : rows;
  const numbers = scored.map(({ number }) => number);
  const [first, second] = [...rows].sort((a, b) => low(a) - low(b));
  const lowest = second && low(first) < low(second) ? first.name : null;
  const captions = [`${scored[0].run.figures.weights} weights${lowest === null ? "" : `; lowest: ${lowest}`}`];
  if (others.length) captions.push(`not shown: ${others.map(({ run }) => run.short).slice(0, 3).join(", ")}${others.length > 3 ? ", …" : ""}, scored on ${others[0].run.figures.weights} weights`);
  if (most.length > scored.length) captions.push(`the best ${scored.length} of ${most.length} runs`);
  if (rows.length > 20) captions.push(`the 20 lowest of ${rows.length} classes`);
  return { rows: shown, single: false, lowest, numbers, names: scored.map(({ run }) => run.short), label: "accuracy (%)",
    caption: captions.join("; "), summary: `${scored.length} runs`,
    legend: scored.map(({ run, number }) => [run.short, spot(number)]) };
}
