// Short names of runs, their values of settings, and the groups that can share an axis.

const MIN_SAVED = 6; // characters worth a short name
const MIN_SHORT = 3;
const FAILED = ["diverged", "collapsed"];
const MANY = 12; // runs above which only a choice has a colour

// Give each run a short name: what all names begin or end with is left out.
function shorten(all) {
  const words = all.map((run) => run.name.split(/([-_/ ])/));
  const most = Math.min(...words.map((one) => one.length)) - 1;
  const same = (at) => words.every((one) => at(one) === at(words[0]));
  let first = 0;
  let last = 0;
  while (first < most && same((one) => one[first])) first += 1;
  while (last < most - first && same((one) => one[one.length - 1 - last])) last += 1;
  first -= first % 2; // keep whole words
  last -= last % 2;
  const cut = () => words.map((one) => one.slice(first, one.length - last).join(""));
  while (first > 0 && cut().some((name) => name.length < MIN_SHORT)) first -= 2;
  const names = cut();
  const worth = all.length > 1 && all[0].name.length - names[0].length >= MIN_SAVED && new Set(names).size === new Set(all.map((run) => run.name)).size;
  all.forEach((run, place) => { run.short = worth ? names[place] : run.name; });
}

// Return the value of a setting as it was applied.
function settingOf(run, name) {
  return run.compared[name];
}

// Return the runs of each data set, the largest group first: scores on different data share no axis.
function groupsOf(runs) {
  const found = new Map();
  for (const run of runs) {
    const name = run.settings.timing_only ? "times only" : run.dataset || "unknown data";
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(run);
  }
  return [...found].sort((a, b) => b[1].length - a[1].length);
}

// Return each setting that differs: its values, and the runs that have them. `compared_settings` says what is compared.
function differences(runs) {
  const found = [];
  const readable = runs.filter((run) => Object.keys(run.compared).length);
  for (const name of Object.keys(readable[0]?.compared || {})) {
    const groups = new Map();
    const write = name === "rule" ? shortRule(readable) : settingText;
    for (const run of readable) {
      const value = write(settingOf(run, name));
      if (!groups.has(value)) groups.set(value, []);
      groups.get(value).push(run);
    }
    if (groups.size > 1) found.push([name, groups]);
  }
  return found;
}

// Settings worth a column, the first first. Any other one is if neither strategy nor data decide it; the last ones come last.
const TELLING = ["dataset", "strategy", "workers", "optimizer", "lr", "momentum", "batch_size"];
const LAST = ["model", "warmup", "split", "validation", "path", "eval_every", "faults", "scored_weights"];

// Return the differing settings that tell the runs apart, the most telling first.
function tellingSettings(runs, names) {
  const decided = (name, by) => {
    const found = new Map();
    for (const run of runs) {
      const [key, value] = [by.map((one) => run[one]).join("\n"), settingText(settingOf(run, name))];
      if (name === "rule" && value === "auto") continue; // it has not chosen yet
      found.set(key, (found.get(key) || new Set()).add(value));
    }
    return [...found.values()].every((values) => values.size === 1);
  };
  const others = names.filter((name) => !TELLING.includes(name) && !decided(name, ["strategy", "dataset"]));
  return [...TELLING.filter((name) => names.includes(name)), ...others.sort((a, b) => LAST.includes(a) - LAST.includes(b))];
}

function flagOf(name) {
  return name === "scored_weights" ? "scored weights" : name.replaceAll("_", "-");
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
  if (members.length > 3 && (2 * members.length > runs.length || runs.length > MANY)) return `${members.length} runs`;
  return members.map((one) => one.short).join(", ");
}

// Return the kind of weights that all scored runs have a score for; null if there is none.
function comparable(runs, name) {
  const scored = runs.filter((run) => known(run.figures[name]));
  const kinds = [...new Set(scored.map((run) => run.figures.weights))];
  return (kinds.length === 1 ? kinds : WEIGHTS).find((kind) => scored.every((run) => known(run.figures[`${kind}_${name}`]))) || null;
}

function isLoss(name) {
  return /loss|err|perplexity/i.test(name);
}

// Return the runs that can be the best: those with final figures if there are any. Early scores may be of other weights.
function rankable(runs) {
  const sound = runs.filter((run) => !FAILED.includes(run.status));
  const over = sound.filter((run) => !run.going_on && !run.figures.scored_early);
  return over.length ? over : sound;
}

// Return what runs of one data set are ranked by: {value(run), lowest, text(run), part}; null if they share no figure.
// Validation data comes first if all have some. A regression has losses only. Own loops are ranked by what they report.
function rankingOf(runs) {
  const ended = rankable(runs);
  const what = scoreOf(ended);
  const scored = ended.filter((run) => known(run.figures[`test_${what}`]));
  for (const part of ["validation", "test"]) {
    const kind = comparable(scored, `${part}_${what}`);
    const name = `${kind}_${part}_${what}`;
    if (!scored.length || !kind || !scored.every((run) => known(run.figures[name]))) continue;
    const shared = scored.some((run) => run.figures.weights && run.figures.weights !== kind) ? ", the ones that all runs were scored with" : "";
    const figure = (run) => (what === "loss" ? `${part} loss ${run.figures[name].toFixed(4)}` : `${KINDS.percent(run.figures[name])} ${part} accuracy`);
    return { value: (run) => run.figures[name], text: (run) => `${figure(run)} (${kind} weights${shared})`, part, lowest: what === "loss" };
  }
  if (scored.length) return null;
  const names = Object.keys(ended[0]?.figures.metrics || {}).filter((name) => ended.every((run) => known(run.figures.metrics[name])));
  const name = names.find((one) => /acc|f1|auc|bleu|score/i.test(one)) || names.find(isLoss);
  if (!name) return null;
  const value = (run) => run.figures.metrics[name];
  return { value, text: (run) => `${name} ${digits(value(run), 4)} (as reported)`, part: null, lowest: !/acc|f1|auc|bleu|score/i.test(name) };
}

// Return what is scored on the test data of these runs: the accuracy, or the loss if there is none.
function scoreOf(runs) {
  return !runs.some((run) => known(run.figures.test_accuracy)) && runs.some((run) => known(run.figures.test_loss)) ? "loss" : "accuracy";
}

// Return all runs of one data set, from the best to the worst and then the others.
function fromTheBest(runs) {
  const first = ranked(runs);
  return [...first, ...runs.filter((run) => !first.includes(run))];
}

// Return the runs of one data set from the best to the worst; unscored and failed ones are left out.
function ranked(runs, ranking = rankingOf(runs)) {
  if (!ranking) return [];
  const found = rankable(runs).filter((run) => known(ranking.value(run)));
  return found.sort((a, b) => (ranking.lowest ? 1 : -1) * (ranking.value(a) - ranking.value(b)));
}
