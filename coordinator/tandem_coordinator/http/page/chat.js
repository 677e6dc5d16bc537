// The tab with the chat: a conversation, whose answers stream in as Markdown.

import { chosen, events } from "./api.js";
import { showCode } from "./code.js";
import { $, made, madeButton } from "./dom.js";
import { rangesOf, rendered } from "./markdown.js";
import { Run, TRACED, tokensOf } from "./run.js";

const PATH = "/v1/chat/completions";
const FIELDS = {
  max_tokens: "chat-max-tokens",
  temperature: "chat-temperature",
  top_p: "chat-top-p",
  top_k: "chat-top-k",
  seed: "chat-seed",
  num_speculative_tokens: "chat-count",
};
const SAMPLES = ["Explain in two sentences what a stack is.", "Write a Python function that reverses a string.", "List five facts about rivers."];
const NEAR_END = 48; // pixels: who is so near to the end follows what is written
const THOUGHT = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

const turns = [];
const accepted = globalThis.Highlight ? new Highlight() : null; // ranges of the text that the draft proposed
let running = null; // the AbortController of the answer that runs
let follows = true; // the newest answer is kept in view
let modelName = "";

// ---- turns

class Turn {
  constructor(role, content = "") {
    this.role = role;
    this.content = content;
    this.thought = "";
    this.flags = []; // of each UTF-16 unit of the content, whether the draft proposed it
    this.run = null;
    this.problem = "";
    this.isStopped = false;
    this.ranges = [];
    this.element = made("article", `turn ${role}`);
    this.element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
    this.body = made("div", "body");
    this.foot = made("footer", "foot");
    this.element.append(this.body, this.foot);
  }

  add(choice) {
    const { content, reasoning_content: reasoning } = choice.delta;
    this.thought += reasoning ?? "";
    for (const [text, isDrafted] of tokensOf(content ?? "", choice)) {
      this.content += text;
      for (let unit = 0; unit < text.length; unit += 1) this.flags.push(isDrafted);
    }
    this.run.add(choice);
  }

  remove() {
    this.clearRanges();
    this.element.remove();
  }

  clearRanges() {
    for (const range of this.ranges) accepted?.delete(range);
    this.ranges = [];
  }
}

function showTurn(turn) {
  turn.clearRanges();
  if (turn.role === "user") {
    turn.body.textContent = turn.content;
    turn.foot.replaceChildren(
      madeButton("Edit", "Edit this message", () => edit(turn)),
      ...copyButton("Copy this message", () => turn.content),
    );
    return;
  }
  const isRunning = turn === turns.at(-1) && running !== null;
  turn.element.setAttribute("aria-busy", String(isRunning));
  const [thought, answer] = divided(turn);
  const text = made("div", "text");
  text.append(rendered(answer));
  turn.body.replaceChildren(...(thought ? [thoughtOf(thought, !answer && isRunning)] : []), text);
  const blocks = [...text.querySelectorAll("pre")];
  blocks.forEach(frame); // a range of what is moved would be lost
  if (accepted && answer) {
    turn.ranges = rangesOf(text, answer, turn.flags.slice(turn.content.length - answer.length));
    for (const range of turn.ranges) accepted.add(range);
  }
  blocks.forEach(addBar);
  if (isRunning && !turn.content && !turn.thought) turn.body.append(made("span", "waiting", "\u2026"));
  if (turn.problem) {
    const problem = made("p", "problem", turn.problem);
    problem.setAttribute("role", "alert");
    turn.body.append(problem);
  }
  showFoot(turn, isRunning);
}

/** The thought with which an answer may begin, and the rest. */
function divided(turn) {
  const thought = THOUGHT.exec(turn.content);
  if (!thought) return [turn.thought, turn.content];
  return [turn.thought + thought[1].trim(), turn.content.slice(thought[0].length)];
}

function thoughtOf(thought, isOpen) {
  const details = made("details", "thought");
  details.open = isOpen;
  details.append(made("summary", "", "Reasoning"), made("p", "", thought));
  return details;
}

function frame(block) {
  const around = made("div", "block");
  block.tabIndex = 0;
  block.replaceWith(around);
  around.append(block);
}

/** The language of a block of code, and a button that copies it. */
function addBar(block) {
  const language = /language-([\w+#-]+)/.exec(block.firstElementChild?.className ?? "");
  const bar = made("div", "bar-of-code", language ? language[1] : "code");
  bar.append(...copyButton("Copy this code", () => block.textContent));
  block.before(bar);
}

function copyButton(label, text) {
  if (!navigator.clipboard) return []; // only pages from this machine or by HTTPS may
  const button = madeButton("Copy", label, async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return [button];
}

function showFoot(turn, isRunning) {
  const figures = made("span", "figures");
  const words = [...turn.run.figures, ...(turn.isStopped ? ["stopped"] : [])];
  figures.append(...words.map((figure) => made("span", "", figure)));
  const actions = isRunning
    ? []
    : [...copyButton("Copy this answer", () => turn.content), madeButton("Retry", "Answer again", () => retry(turn))];
  turn.foot.replaceChildren(figures, ...actions);
}

// ---- the conversation

function add(turn) {
  turns.push(turn);
  $("turns").append(turn.element);
  showTurn(turn);
  $("welcome").hidden = true;
}

/** Leave out this turn and all that follow it. */
function cutAt(turn) {
  for (const removed of turns.splice(turns.indexOf(turn))) removed.remove();
  $("welcome").hidden = turns.length > 0;
}

function keepInView() {
  const view = $("conversation");
  if (follows) view.scrollTop = view.scrollHeight;
  $("newest").hidden = follows;
}

/** The messages so far. A question without an answer is left out, but for the last. */
function messages() {
  const system = $("system").value.trim();
  const said = turns.filter((turn, index) => {
    const answer = turn.role === "user" ? turns[index + 1] : turn;
    return answer === undefined || answer === turns.at(-1) || answer.content !== "";
  });
  if (said.at(-1)?.role === "assistant" && running) said.pop(); // the answer that is being made
  return [...(system ? [{ role: "system", content: system }] : []), ...said.map(({ role, content }) => ({ role, content }))];
}

function requested() {
  const options = chosen(FIELDS);
  const rule = $("chat-rule").value;
  return { ...options, ...(rule ? { rejection_sampling_strategy: rule } : {}), messages: messages() };
}

async function answer() {
  const turn = new Turn("assistant");
  turn.run = new Run();
  running = new AbortController();
  follows = true;
  add(turn);
  showRunning();
  $("chat-said").textContent = "Answering";
  let painting = 0; // the frame in which it is shown next
  const show = () => {
    painting = 0;
    showTurn(turn);
    keepInView();
  };
  try {
    for await (const event of events(PATH, { ...requested(), ...TRACED }, running.signal)) {
      const choice = event.choices[0];
      if (choice) turn.add(choice);
      else turn.run.state = event.speculation?.state ?? null; // the last piece tells what it took, and no text
      painting ||= requestAnimationFrame(show);
    }
  } catch (error) {
    if (error.name === "AbortError") turn.isStopped = true;
    else turn.problem = error.message;
  }
  cancelAnimationFrame(painting);
  running = null;
  showRunning();
  if (!turns.includes(turn)) return; // a new chat has begun
  show();
  $("chat-said").textContent = turn.problem ? "" : `${turn.isStopped ? "Stopped" : "Answered"}: ${turn.body.textContent}`;
}

function send(text) {
  if (running || !text.trim()) return;
  add(new Turn("user", text));
  answer();
}

function retry(turn) {
  if (running) return;
  cutAt(turn);
  answer();
  $("message").focus();
}

function edit(turn) {
  if (running) return;
  const form = made("form", "edit");
  const field = made("textarea");
  field.value = turn.content;
  field.setAttribute("aria-label", "Your message");
  const leave = () => showTurn(turn);
  const sendButton = made("button", "", "Send");
  sendButton.type = "submit";
  form.append(field, madeButton("Cancel", "Leave the message as it was", leave), sendButton);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    cutAt(turn);
    send(field.value);
    $("message").focus();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    sendOnEnter(event, form);
  });
  field.addEventListener("input", () => fit(field));
  turn.body.replaceChildren(form);
  turn.foot.replaceChildren();
  fit(field);
  field.focus();
}

function newChat() {
  running?.abort();
  if (turns.length) cutAt(turns[0]);
  $("message").focus();
}

// ---- the form

function sendOnEnter(event, form) {
  // While a word is composed, as in Japanese, Enter takes the word.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

/** As high as its text, up to what the style allows. */
function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function showRunning() {
  $("send").textContent = running ? "Stop" : "Send";
  $("send").toggleAttribute("data-running", running !== null);
}

function showColours() {
  if (!accepted) return;
  if ($("colours").checked) CSS.highlights.set("accepted", accepted);
  else CSS.highlights.delete("accepted");
}

function toggleDrawer(isOpen) {
  $("drawer").hidden = !isOpen;
  $("settings").setAttribute("aria-expanded", String(isOpen));
  (isOpen ? $("system") : $("settings")).focus();
  showChatCode();
}

function showChatCode() {
  if (!$("chat-code").open || $("drawer").hidden) return;
  const typed = $("message").value.trim();
  const body = requested();
  if (typed || !turns.length) body.messages.push({ role: "user", content: typed || SAMPLES[0] });
  showCode("chat-curl", "chat-python", PATH, body, modelName);
}

/** What the tab shows of the coordinator's status. */
export function showStatus(status, name) {
  modelName = name;
  $("welcome-title").textContent = name ? `Chat with ${name.split("/").at(-1)}` : "Chat";
  $("chat-count").placeholder = status.settings.num_speculative_tokens;
}

export function focus() {
  $("message").focus();
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = $("message").value;
  if (!text.trim()) return;
  $("message").value = "";
  fit($("message"));
  send(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (!running) sendOnEnter(event, $("chat-form"));
  else if (event.key === "Enter" && !event.shiftKey) event.preventDefault(); // the text waits for the answer's end
});
$("message").addEventListener("input", () => fit($("message")));
$("conversation").addEventListener("scroll", () => {
  const view = $("conversation");
  follows = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR_END;
  $("newest").hidden = follows;
});
$("newest").addEventListener("click", () => {
  follows = true;
  keepInView();
});
$("settings").addEventListener("click", () => toggleDrawer($("drawer").hidden));
$("close-drawer").addEventListener("click", () => toggleDrawer(false));
$("drawer").addEventListener("keydown", (event) => {
  if (event.key === "Escape") toggleDrawer(false);
});
$("drawer").addEventListener("input", showChatCode);
$("chat-code").addEventListener("toggle", showChatCode);
$("new-chat").addEventListener("click", newChat);
$("colours").addEventListener("change", showColours);
$("colours-option").hidden = accepted === null;
for (const sample of SAMPLES) {
  const button = made("button", "", sample);
  button.type = "button";
  button.addEventListener("click", () => {
    send(sample);
    $("message").focus();
  });
  $("chat-samples").append(button);
}
showColours();
