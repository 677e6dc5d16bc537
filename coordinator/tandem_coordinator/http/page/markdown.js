// A model's answer as Markdown. Nothing in it can run: tags are shown as text, and what remains is sanitised.

import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js"; // sets DOMPurify

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a",
    "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const LOOK_AHEAD = 400; // characters of markup, such as a link's address, that are passed over at once

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // An image would be loaded from a place that the model chose, which may be told something by its address.
    image: ({ text, href }) => escaped(`![${text}](${href})`),
  },
});

/** The answer as a fragment of elements. */
export function rendered(text) {
  const fragment = globalThis.DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  return fragment;
}

/**
 * Ranges of the rendered text that come from flagged characters of the source.
 *
 * Rendering only takes markup away, so each character of the rendered text is looked for in the source behind the one
 * before it. White space is not: rendering adds some.
 */
export function rangesOf(root, source, flags) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const ranges = [];
  let place = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode;
    let start = -1; // of the flagged characters that end here
    let end = 0;
    for (let index = 0; index < node.length; index += 1) {
      const character = node.data[index];
      if (/\s/.test(character)) continue;
      const found = source.slice(place, place + LOOK_AHEAD).indexOf(character);
      if (found < 0) continue;
      place += found + 1;
      const isFlagged = flags[place - 1];
      if (!isFlagged && start >= 0) {
        ranges.push(rangeIn(node, start, end));
        start = -1;
      }
      if (isFlagged && start < 0) start = index;
      end = index + 1;
    }
    if (start >= 0) ranges.push(rangeIn(node, start, end));
  }
  return ranges;
}

function rangeIn(node, start, end) {
  const range = new Range();
  range.setStart(node, start);
  range.setEnd(node, end);
  return range;
}
