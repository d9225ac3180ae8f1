// The feed of a live page: changed runs as server-sent events; reconnects after a loss.

const AGAIN_MILLISECONDS = 2000;
const MAX_FOLLOWED = 60;

// Draw updates at most once per frame, and not while the page is hidden.
let undrawn = false;

function take(digests, whole) {
  if (whole) runs.clear();
  for (const digest of digests) runs.set(digest.id, digest);
  for (const [id, run] of runs) if (runs.size > MAX_FOLLOWED && !run.going_on && id !== page.chosen) runs.delete(id);
  if (undrawn) return;
  undrawn = true;
  requestAnimationFrame(() => {
    undrawn = false;
    page.update();
    entitle();
  });
}

function entitle() {
  const run = runs.get(page.chosen) || [...runs.values()][0];
  if (!run) return;
  const share = run.going_on && known(run.figures.fraction) ? `${Math.floor(100 * run.figures.fraction)} %` : run.status;
  document.title = `${share} – ${run.name} – Paceline`;
}

function follow(address) {
  const source = new EventSource(address);
  let last = null;
  const hear = (whole) => (event) => {
    last = event.lastEventId;
    take(JSON.parse(event.data), whole);
  };
  source.onopen = () => page.feed("live", "on");
  source.onmessage = hear(false);
  source.addEventListener("all", hear(true));
  source.onerror = () => {
    if (!page.live.classList.contains("off")) page.feed(`connection lost at ${new Date().toLocaleTimeString("en-GB")}, trying again`, "off");
    // A response that is not a feed (wrong token, too many connections) closes the source for good.
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MILLISECONDS, last ? `/events?after=${last}` : address);
  };
}

if (facts.live) {
  entitle();
  follow(facts.live);
}
