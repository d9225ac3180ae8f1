// Readable numbers, axis ticks, and DOM elements.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Round to significant digits, without an exponent if that is readable.
function digits(value, count = 3) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-5) return exponent(value, count);
  if (size >= 10 ** Math.min(3, count)) return Number(value.toPrecision(Math.max(count, Math.floor(Math.log10(size)) + 1))).toLocaleString("en-US");
  return String(Number(value.toPrecision(count)));
}

function exponent(value, count) {
  return Number(value.toPrecision(Math.min(3, count))).toExponential().replace("e+", "e");
}

// Return the label of a tick: it fits beside the axis whatever the range.
function tickText(value) {
  const size = Math.abs(value);
  return size >= 1e4 || (size > 0 && size < 1e-3) ? exponent(value, 3) : digits(value, 4);
}

const SIZES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

function short(value, unit = "") {
  if (!known(value)) return "–";
  for (const [size, letter] of SIZES) {
    if (Math.abs(value) >= size && (unit || Math.abs(value) >= 10 * size || letter !== "k")) {
      return `${digits(value / size)} ${letter}${unit}`;
    }
  }
  return unit ? `${digits(value)} ${unit}` : digits(value, 4);
}

const CLOCK = [[172800, 86400, "d"], [7200, 3600, "h"], [180, 60, "min"], [0, 1, "s"]];

function clockUnit(seconds) {
  const [, size, name] = CLOCK.find(([from]) => seconds >= from) || CLOCK[3];
  return { size, name };
}

// Return a duration as `seconds_text` does: 31 ms, 0.9 s, 42 s, 4 min 35 s, 2 h 13 min, 3 d 4 h.
function clock(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0.0995 && seconds > 0) return `${digits(1000 * seconds, 2)} ms`;
  if (seconds < 9.95) return `${Number(seconds.toPrecision(2))} s`;
  for (const [size, less, name, lesser] of [[86400, 3600, "d", "h"], [3600, 60, "h", "min"], [60, 1, "min", "s"]]) {
    const count = Math.round(seconds / less);
    const [whole, rest] = [Math.floor((count * less) / size), count % (size / less)];
    if (whole) return `${whole} ${name}${rest ? ` ${rest} ${lesser}` : ""}`;
  }
  return `${Math.round(seconds)} s`;
}

// Return samples per second as the sentence on a run has them.
function rateText(value) {
  return known(value) && value >= 10 ? Math.round(value).toLocaleString("en-US") : digits(value, 2);
}

const KINDS = {
  number: (value) => digits(value, 4),
  count: (value) => (known(value) && Number.isInteger(value) ? value.toLocaleString("en-US") : digits(value, 4)),
  percent: (value) => (known(value) ? `${value.toFixed(2)} %` : "–"),
  bytes: (value) => short(value, "B"),
  rate: (value) => `${rateText(value)} /s`,
  seconds: clock,
};

// Return the unit of an axis for a kind of number, and its size.
function unitOf(kind, most) {
  if (kind === "seconds") return clockUnit(most);
  if (kind === "bytes") {
    const found = SIZES.find(([size]) => most >= size);
    return found ? { size: found[0], name: `${found[1]}B` } : { size: 1, name: "B" };
  }
  if (kind === "percent") return { size: 1, name: "%" };
  if (kind === "count" || kind === "rate") {
    if (most >= 1e9) return { size: 1e9, name: "billion" };
    if (most >= 1e6) return { size: 1e6, name: "million" };
    if (most >= 1e4) return { size: 1e3, name: "thousand" };
  }
  return { size: 1, name: "" };
}

// Return at most `count` round numbers within a span.
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * size).find((one) => one >= raw * 0.999) || 10 * size;
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) {
    found.push(Number((place * step).toPrecision(12)));
  }
  return found;
}

const FEW_TICKS = 3; // fewer labels do not tell a logarithmic axis
const IN_DECADE = [[1, 2, 5], [1, 3], [1, 2, 3, 5, 7]];

// Return at most `count` round numbers of a logarithmic axis, FEW_TICKS at least, and one in the lowest
// and in the highest third if possible: some of each decade, every so many decades or, in a part of one decade, at
// equal distances.
function logTicks(low, high, count) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.log10(high)];
  const powers = Array.from({ length: Math.max(1, Math.floor(last) - first + 1) }, (_, place) => first + place);
  const within = (value) => value >= low * 0.999 && value <= high * 1.001;
  const round = (value) => Number(value.toPrecision(12));
  const finer = (powers.length > count ? [] : IN_DECADE)
    .map((those) => powers.flatMap((power) => those.map((one) => round(one * 10 ** power))).filter(within))
    .filter((marks) => marks.length >= FEW_TICKS && marks.length <= count);
  const third = Math.cbrt(high / low);
  const spread = finer.find((marks) => marks[0] / low <= third && high / marks.at(-1) <= third) || finer[0];
  if (spread) return spread;
  const whole = powers.map((power) => round(10 ** power)).filter(within);
  const step = Math.ceil(whole.length / count);
  const coarse = whole.filter((value) => Math.round(Math.log10(value)) % step === 0);
  return coarse.length >= FEW_TICKS ? coarse : ticks(low, high, count).filter((value) => value > 0);
}

const EXPLODED = 100; // a loss has exploded at so many times the first one

function explodedFrom(values) {
  const first = values.find(known);
  return first > 0 ? EXPLODED * first : Infinity;
}

// Smooth by weighted means, forward and backward, so that nothing is shifted. An exploded value stays as it is, and no
// other takes part in it.
function smooth(values, weights) {
  const limit = explodedFrom(values);
  const places = values.map((_, place) => place).filter((place) => known(values[place]) && values[place] <= limit);
  const keep = Math.exp(-1 / Math.max(1, places.length / 60));
  const sums = values.map(() => 0);
  const counts = values.map(() => 0);
  for (const order of [places, [...places].reverse()]) {
    let sum = 0;
    let count = 0;
    for (const place of order) {
      const weight = weights[place] || 1;
      sum = sum * keep + values[place] * weight;
      count = count * keep + weight;
      sums[place] += sum - (order === places ? 0 : values[place] * weight);
      counts[place] += count - (order === places ? 0 : weight);
    }
  }
  return values.map((value, place) => (known(value) && value <= limit ? sums[place] / counts[place] : value));
}

// A score belongs to the live weights or to their running average; one is never compared with the other.
const WEIGHTS = ["live", "averaged"];

const COLOURS = 7;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

function colourOf(number) {
  return `var(--c${number % COLOURS})`;
}

// Return the legend sample of a line.
function stroke(colour, dash = "") {
  const kind = !dash ? "solid" : dash.startsWith("2") ? "dotted" : "dashed";
  return `height:0;width:18px;border-radius:0;border-top:3px ${kind} ${colour}`;
}

function dashOf(number) {
  return DASHES[Math.floor(number / COLOURS) % DASHES.length];
}

// Shapes of dots, as corners within a square of side 2: round, square, triangle, diamond. Runs of one colour differ by them.
const SHAPES = [null, [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], [[0, -1.1], [1.1, 0.9], [-1.1, 0.9]], [[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]]];

function shapeOf(number) {
  return SHAPES[Math.floor(number / COLOURS) % SHAPES.length];
}

// Return the legend sample of a dot.
function spot(number) {
  const corners = shapeOf(number)?.map((corner) => corner.map((one) => `${Math.round(50 + 41 * one)}%`).join(" "));
  return `background:${colourOf(number)};border-radius:${corners ? 0 : "50%"};clip-path:${corners ? `polygon(${corners.join(",")})` : "none"}`;
}
