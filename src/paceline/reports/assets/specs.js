// Chart specifications from report data.

const MARKED = ["a worker lost, a fault or a resume", "background:repeating-linear-gradient(0deg,var(--away) 0 2px,transparent 2px 5px);width:2px"];

const BAND_PUSHES = 4; // of a span whose least and greatest loss say something
const BAND_SHARE = 0.75; // of the spans that need so many: fewer would be slivers

function lossSpec(run, axis, x, marks) {
  const { course, scores } = run;
  const even = smooth(course.loss, course.count);
  const series = [];
  const legend = [];
  if (course.t.length) {
    const several = (values) => values.map((value, place) => (course.count[place] >= BAND_PUSHES ? value : null));
    const [low, high] = [several(course.low), several(course.high)];
    const band = low.filter(known).length >= BAND_SHARE * low.length && stretchesOf(low, high).length > 0;
    series.push({ name: "train, as pushed", x: course[axis], y: even, colour: "var(--c0)", dots: 0,
      low: band ? low : null, high: band ? high : null });
    legend.push(["train, as pushed, smoothed", stroke("var(--c0)")]);
    if (band) legend.push(["least to greatest", "background:var(--c0);opacity:.25"]);
  }
  for (const [name, text, colour] of scoreLines(run, "loss")) {
    if (!scores[name].some(known)) continue;
    series.push({ name: text, x: scores[axis], y: scores[name], colour });
    legend.push([text, stroke(colour)]);
  }
  const values = series.flatMap((one) => one.y).filter((value) => known(value) && value > 0);
  if (!values.length) return null;
  const last = course.loss.length ? even[even.length - 1] : null;
  const summary = known(last) ? `Train loss ends at ${digits(last)}` : "";
  if (marks.length) legend.push(MARKED);
  return { x, y: { label: "loss, mean over samples", kind: "number", ...logScale(values) }, series, legend, marks, summary };
}

const MIN_LOG_RATIO = 4;

// Return the scale of a loss: logarithmic if all values are positive and they span enough. The reader can change it.
function logScale(all) {
  const values = all.filter(known);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return { log: low > 0 && high / low >= MIN_LOG_RATIO, scales: low > 0, zero: low < 0.6 * high };
}

// Return key, name and colour of each line of scores: those of the scored weights, and of the live ones if they are others.
function scoreLines(run, what) {
  const { weights } = run.figures;
  return [[`test_${what}`, `test, ${weights}`, "var(--c1)"], [`validation_${what}`, `validation, ${weights}`, "var(--c4)"], [`train_${what}`, `train, ${weights}`, "var(--c2)"], [`live_test_${what}`, "test, live", "var(--c3)"]];
}

function accuracySpec(run, axis, x, marks) {
  const series = [];
  const legend = [];
  for (const [name, text, colour] of scoreLines(run, "accuracy")) {
    if (!run.scores[name].some(known)) continue;
    series.push({ name: text, x: run.scores[axis], y: run.scores[name], colour });
    legend.push([text, stroke(colour)]);
  }
  if (run.scores.t.length < 2 || !series.length) return null; // the tiles tell the only scores
  const best = Math.max(...run.scores.test_accuracy.filter(known));
  const summary = Number.isFinite(best) ? `Test accuracy at best ${KINDS.percent(best)} (${run.figures.weights} weights)` : "";
  return { x, y: { label: "accuracy", kind: "percent", floor: 0, ceiling: 100 }, series, legend, marks, summary };
}

function reportedSpec(run, name, axis, x, marks) {
  const { [axis]: times, value } = run.reported[name];
  if (value.filter(known).length < 2) return null;
  const y = { label: "as the script reported it", kind: "number", ...(isLoss(name) ? logScale(value) : {}) };
  return { x, y, series: [{ name, x: times, y: value, colour: "var(--c1)" }], marks, summary: `ends at ${digits(value.filter(known).at(-1), 4)}` };
}

function classSpec(run, most = 20) {
  const scored = run.per_class.filter(([, value]) => known(value));
  if (!scored.length) return null;
  const shown = scored.length > most ? [...scored].sort((a, b) => a[1] - b[1]).slice(0, most) : scored;
  const rows = shown.map(([name, value]) => ({ name, values: [value] }));
  const [lowest, second] = [...scored].sort((a, b) => a[1] - b[1]);
  const worst = second && lowest[1] < second[1] ? lowest[0] : null;
  const caption = `${run.figures.weights} weights${worst === null ? "" : `; lowest: ${worst}`}` + (scored.length > most ? `; the ${most} lowest of ${scored.length}` : "");
  return { rows, single: true, lowest: worst, numbers: [0], names: [run.name], label: "accuracy (%)", caption,
    summary: `lowest: ${lowest[0]} with ${KINDS.percent(lowest[1])}` };
}

function lineSpec(columns, name, axis, x, y, steps = false) {
  const values = columns[name];
  if (!values || values.filter(known).length < 2) return null;
  const colour = "var(--c0)";
  return { x, y, series: [{ name: y.label, x: columns[axis], y: values, colour, steps }], summary: `ends at ${digits(values.filter(known).at(-1))}` };
}

function bytesSpec(run, x) {
  const { progress, figures } = run;
  const series = [];
  for (const [name, text, colour] of [["bytes_pushed", "pushed", "var(--c0)"], ["bytes_pulled", "pulled", "var(--c1)"]]) {
    if (!progress[name]) continue;
    const end = run.going_on || !known(figures[name]) ? [] : [figures[name]];
    const times = [0, ...progress.t, ...(end.length ? [figures.seconds] : [])];
    series.push({ name: text, x: times, y: [0, ...progress[name], ...end], colour, dots: 0, dash: name === "bytes_pulled" ? "5 3" : "" });
  }
  if (!series.some((one) => one.y.some((value) => value > 0))) return null;
  const legend = series.map((one) => [one.name, stroke(one.colour, one.dash)]);
  return { x, y: { label: "bytes so far", kind: "bytes", zero: true }, series, legend,
    summary: `${KINDS.bytes(figures.bytes_pushed)} pushed, ${KINDS.bytes(figures.bytes_pulled)} pulled` };
}
