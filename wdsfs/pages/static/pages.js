// Fills in what is on the screen (previews and snippets), refreshes what the table changes, and has the keyboard.
// The pages work without it, by links.
"use strict";

const fill = {
  async preview(place) {
    const answer = await fetch(place.dataset.preview);
    // The server escapes all text of shards, and no script but this file may run.
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const part = page.querySelector("main") || page.body;
    place.replaceChildren(...part.childNodes);
    place.dataset.filled = answer.ok ? "yes" : "error";
  },
  async snippet(place) {
    const answer = await fetch(place.dataset.snippet);
    const text = answer.ok ? await answer.text() : "";
    if (text || !place.matches(".tile")) place.textContent = text;
    place.dataset.filled = "yes";
  },
};

const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    watcher.unobserve(target);
    const kind = "preview" in target.dataset ? "preview" : "snippet";
    fill[kind](target).catch(() => { target.textContent = "The server does not answer."; });
  }
}, { rootMargin: "200px" });

function fillIn(part) {
  for (const place of part.querySelectorAll("[data-preview], [data-snippet]")) watcher.observe(place);
  for (const picture of part.querySelectorAll(".grid img")) {
    if (picture.complete && picture.src && !picture.naturalWidth && picture.currentSrc) replaceBroken(picture);
    else picture.addEventListener("error", () => replaceBroken(picture));
  }
  if (navigator.clipboard) part.querySelectorAll(".command").forEach(addCopyButton);
}

// A thumbnail that cannot be made is replaced by a tile that says what the file is.
function replaceBroken(picture) {
  const tile = document.createElement("span");
  tile.className = "tile";
  tile.textContent = "no picture";
  picture.replaceWith(tile);
}

function addCopyButton(command) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(command.querySelector("code").textContent);
    button.textContent = "Copied";
  });
  command.append(button);
}

// While the table of the set is made, the page asks for itself again, and shows the parts that have changed.
const shown = new Map();
for (const part of document.querySelectorAll("[data-live]")) shown.set(part.dataset.live, part.innerHTML);

async function refresh() {
  const began = performance.now();
  const answer = await fetch(location.href);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of answer.ok ? page.querySelectorAll("[data-live]") : []) {
    const place = document.querySelector(`[data-live=${part.dataset.live}]`);
    if (shown.get(part.dataset.live) === part.innerHTML || place.contains(document.activeElement)) continue;
    shown.set(part.dataset.live, part.innerHTML);
    place.replaceChildren(...part.childNodes);
    fillIn(place);
  }
  waitForTable(1000 + 4 * (performance.now() - began));
}

function waitForTable(milliseconds) {
  if (!document.querySelector(".state")) return;
  setTimeout(() => (document.hidden ? waitForTable(1000) : refresh().catch(() => waitForTable(5000))), milliseconds);
}

fillIn(document);
waitForTable(1000);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, audio, video, .scroll, pre")) return;
  const turn = { j: "next", ArrowRight: "next", k: "prev", ArrowLeft: "prev" }[event.key];
  const wanted = turn ? document.querySelector(`a[rel=${turn}]`) : findKey(event.key);
  if (!wanted) return;
  event.preventDefault();
  if (!wanted.matches("input")) return wanted.click();
  wanted.closest("details").open = true; // which is folded on a narrow screen
  wanted.focus();
});

function findKey(key) {
  for (const one of document.querySelectorAll("[data-key]")) if (one.dataset.key === key) return one;
  return null;
}
