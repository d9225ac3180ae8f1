// The page: one run, or several and one of them in full. A live one is fed digests that changed, and redraws those.

const facts = JSON.parse(document.getElementById("facts").textContent);
const runs = new Map(facts.runs.map((run) => [run.id, run]));

class Page {
  constructor(root) {
    root.replaceChildren();
    this.several = null;
    this.one = null;
    this.chosen = null;
    this.root = root;
    this.title = el("h1");
    this.status = el("span", { class: "badge" });
    this.live = el("span", { class: "feed", role: "status", hidden: true });
    root.append(el("header", {}, el("div", { class: "brand" }, "Paceline"), el("div", { class: "heading" }, this.title, this.status, this.live)));
    this.body = el("div");
    root.append(this.body);
  }

  update() {
    const all = [...runs.values()];
    tellApart(all);
    if (!all.length) {
      setText(this.title, "No runs yet");
      return;
    }
    if (all.length > 1 !== Boolean(this.several) || !this.one) this.build(all.length > 1);
    if (this.several) {
      setText(this.title, `${all.length} runs`);
      this.status.hidden = true;
      this.several.update(all);
      this.pick(all);
    } else this.head(all[0]);
    this.one.update(runs.get(this.chosen) || all[0]);
  }

  head(run) {
    setText(this.title, run.name);
    setText(this.status, run.status);
    this.status.className = `badge ${run.status}`;
  }

  build(several) {
    this.body.replaceChildren();
    this.several = several ? new SeveralRuns(this.body, (id) => { this.chosen = id; this.update(); }) : null;
    const box = el("div", several ? { id: "one-run", class: "inner" } : {});
    this.body.append(box);
    if (several) {
      this.select = el("select", { "aria-label": "which run", onchange: () => { this.chosen = this.select.value; this.update(); } });
      box.append(el("div", { class: "heading" }, el("h2", {}, "One run in full"), this.select));
    }
    this.one = new OneRun(box, "one");
  }

  pick(all) {
    if (!runs.has(this.chosen)) {
      const scored = all.filter((run) => known(run.figures.test_accuracy));
      const best = scored.reduce((a, b) => (b.figures.test_accuracy > a.figures.test_accuracy ? b : a), scored[0] || all[0]);
      this.chosen = best.id;
    }
    if (this.select.options.length !== all.length) {
      this.select.replaceChildren(...all.map((run) => el("option", { value: run.id }, run.name)));
    }
    this.select.value = this.chosen;
  }

  feed(text, state) {
    this.live.hidden = false;
    this.live.className = `feed ${state}`;
    setText(this.live, text);
  }
}

// Runs of one name are told apart by the folder above.
function tellApart(all) {
  const counts = new Map();
  for (const run of all) counts.set(run.name, (counts.get(run.name) || 0) + 1);
  for (const run of all) if (counts.get(run.name) > 1) run.name = run.id.split("/").slice(-2).join("/");
}

const page = new Page(document.getElementById("page"));
page.update();

// Digests that come faster than frames are drawn once.
let changed = false;

function take(digests) {
  for (const digest of digests) runs.set(digest.id, digest);
  if (changed) return;
  changed = true;
  requestAnimationFrame(() => {
    changed = false;
    page.update();
  });
}

if (facts.live) {
  const source = new EventSource(facts.live);
  source.onopen = () => page.feed("live", "on");
  source.onerror = () => page.feed("connection lost, trying again", "off");
  source.onmessage = (event) => take(JSON.parse(event.data));
}
document.documentElement.dataset.drawn = "true";
