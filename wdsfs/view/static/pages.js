// Fills in what is on the screen (previews and snippets), and the keyboard. The pages work without it, by links.
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
    place.textContent = answer.ok ? await answer.text() : "";
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

for (const place of document.querySelectorAll("[data-preview], [data-snippet]")) watcher.observe(place);

// A thumbnail that cannot be made is replaced by a tile that says what the file is.
function replaceBroken(picture) {
  const tile = document.createElement("span");
  tile.className = "tile";
  tile.textContent = "no picture";
  picture.replaceWith(tile);
}
for (const picture of document.querySelectorAll(".grid img")) {
  if (picture.complete && picture.src && !picture.naturalWidth && picture.currentSrc) replaceBroken(picture);
  else picture.addEventListener("error", () => replaceBroken(picture));
}

for (const place of document.querySelectorAll("[data-again]")) {
  setTimeout(() => location.reload(), Number(place.dataset.again));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, audio, video, .scroll, pre")) return;
  const turn = { j: "next", ArrowRight: "next", k: "prev", ArrowLeft: "prev" }[event.key];
  const wanted = turn ? document.querySelector(`a[rel=${turn}]`) : findKey(event.key);
  if (!wanted) return;
  event.preventDefault();
  if (wanted.matches("input")) wanted.focus();
  else wanted.click();
});

function findKey(key) {
  for (const one of document.querySelectorAll("[data-key]")) if (one.dataset.key === key) return one;
  return null;
}
