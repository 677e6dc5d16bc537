// What both tabs use to show things.

export const $ = (id) => document.getElementById(id);
export const DASH = "\u2013";
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : DASH);

/** A new element with a class and a text. */
export function made(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** A new button that does something. */
export function madeButton(text, label, act) {
  const button = made("button", "plain", text);
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}
