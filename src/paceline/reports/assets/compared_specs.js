// Chart specifications of several runs.

// Return the evaluations of a run on one kind of weights, as in live_test_loss; empty if there were none.
function curveOf(run, metric) {
  const kind = run.figures.weights;
  return run.scores[metric.startsWith(`${kind}_`) ? metric.slice(kind.length + 1) : metric] || [];
}

function curvesSpec(seen, metric, axis, x) {
  const series = [];
  for (const { run, number, on } of [...seen].sort((a, b) => a.on - b.on)) {
    const { course, scores } = run;
    const look = { name: run.short, colour: on ? colourOf(number) : "var(--grey)", dash: on ? dashOf(number) : "", grey: !on };
    if (metric === "train") {
      if (course.t.length) series.push({ ...look, x: course[axis], y: smooth(course.loss, course.count), dots: on ? 1 : 0 });
    } else if (curveOf(run, metric).some(known)) series.push({ ...look, x: scores[axis], y: curveOf(run, metric), dots: on ? 24 : 1 });
  }
  if (!series.length) return null;
  const percent = metric.endsWith("accuracy");
  const y = { label: METRICS.find(([name]) => name === metric)[1], kind: percent ? "percent" : "number" };
  if (percent) Object.assign(y, { floor: 0, ceiling: 100 });
  else Object.assign(y, logScale(series.flatMap((one) => one.y)));
  const coloured = series.filter((one) => !one.grey);
  const legend = coloured.length <= MANY ? coloured.map((one) => [one.name, stroke(one.colour, one.dash)]) : [];
  if (coloured.length < series.length) legend.push([`${series.length - coloured.length} more`, stroke("var(--grey)")]);
  const counts = series.map((one) => one.y.filter(known).length);
  const note = Math.min(...counts) === 1 && Math.max(...counts) > 1 ? "; a dot: scored only at the end on these weights" : "";
  return { x, y, series, legend, note, summary: `${series.length} runs` };
}

const ALIKE = new Set([...NOT_SETTINGS, "workers", "seed", "batch_size", "lr", "shard_weights", "max_workers"]);

// Samples per second by number of workers; one line per combination of the other settings.
function scalingSpec(runs) {
  const lines = new Map();
  for (const run of runs) {
    const { rate, workers } = run.figures;
    if (!known(rate) || !known(workers) || FAILED.includes(run.status)) continue;
    const kind = JSON.stringify(Object.entries(run.settings).filter(([name]) => !ALIKE.has(name)));
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
  const [first, second] = [...rows].sort((a, b) => low(a) - low(b));
  const lowest = second && low(first) < low(second) ? first.name : null;
  const captions = [`${scored[0].run.figures.weights} weights${lowest === null ? "" : `; lowest: ${lowest}`}`];
  if (others.length) captions.push(`not shown: ${others.map(({ run }) => run.short).slice(0, 3).join(", ")}${others.length > 3 ? ", …" : ""}, scored on ${others[0].run.figures.weights} weights`);
  if (rows.length > 20) captions.push(`the 20 lowest of ${rows.length} classes`);
  return { rows: shown, single: false, lowest, colours: look, names: scored.map(({ run }) => run.short), label: "accuracy (%)",
    caption: captions.join("; "), summary: `${scored.length} runs`,
    legend: scored.length <= MANY ? scored.map(({ run }, place) => [run.short, `background:${look[place]}`]) : [] };
}
