// The tab with completions: one prompt, what speculation did for it, and the same by the target alone.

import { chosen, events } from "./api.js";
import { showCode as showRequest } from "./code.js";
import { $, DASH, percent } from "./dom.js";
import { Run, TRACED, tokensOf } from "./run.js";

const PATH = "/v1/completions";
const FIELDS = {
  max_tokens: "max-tokens",
  temperature: "temperature",
  num_speculative_tokens: "count",
  top_p: "top-p",
  seed: "seed",
  rejection_sampling_strategy: "rule",
};
const MOST_ROUNDS = 400;
const SLOWER = 0.97; // below this the difference is more than noise
const COMPARE_HINT = "Tick \u201cthen the target alone\u201d to measure the speed-up: the same prompt, one run each.";
const SAMPLES = ["def read_lines(path):\n    \"\"\"", "class Stack:\n", "def parse(source, filename='<unknown>', mode='exec'):\n", "import os\n"];

let modelName = "";
let running = null; // the AbortController of the completion that runs
const racing = []; // timers of a race

// ---- showing it

function append(output, text, kind, about = "") {
  if (!text) return;
  const wasAtEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 30;
  const span = document.createElement("span");
  span.className = kind;
  span.title = about;
  span.append(text);
  output.append(span);
  if (wasAtEnd) output.scrollTop = output.scrollHeight;
}

function appendTokens(output, text, choice) {
  for (const [token, isDrafted, index] of tokensOf(text, choice)) {
    append(output, token, isDrafted ? "accepted" : "supplied", about(choice, index));
  }
}

// What a token's hover says. At temperature 0 and under `strict` only ids travel, so nobody knows the probabilities.
function about(choice, index) {
  const known = [["draft", choice.draft_probs?.[index]], ["target", choice.target_probs?.[index]]]
    .filter(([, prob]) => prob !== null && prob !== undefined)
    .map(([name, prob]) => `${name} ${prob.toFixed(3)}`);
  return [choice.drafted[index] ? "proposed by the draft and accepted" : "the target's own", ...known].join(" \u00b7 ");
}

// Both completions again, each piece when it came. They ran one after the other, so neither slowed the other down.
function race(runs) {
  stopRace();
  for (const [output, run] of runs) {
    output.replaceChildren(...[...output.childNodes].filter((node) => node.className === "prompt"));
    for (const [at, text, choice] of run.pieces) racing.push(setTimeout(() => appendTokens(output, text, choice), at));
  }
}

function stopRace() {
  racing.splice(0).forEach(clearTimeout);
}

// Tokens per second, over the last tenth of the completion at each place.
function showSpeeds({ arrivals, totalMs }) {
  const span = totalMs / 10;
  let from = 0;
  const speeds = arrivals.map(([at, tokens], index) => {
    while (arrivals[from][0] < at - span && from < index) from += 1;
    const [since, before] = arrivals[from];
    return at > since ? (tokens - before) / (at - since) : 0;
  });
  const most = Math.max(...speeds);
  $("speeds").toggleAttribute("hidden", speeds.length < 10);
  const points = speeds.map((speed, index) => `${((300 * index) / speeds.length).toFixed(1)},${(39 - (38 * speed) / most).toFixed(1)}`);
  $("speeds").firstElementChild.setAttribute("points", points.slice(1).join(" "));
}

function showRound(choice) {
  const accepted = choice.drafted.filter(Boolean).length;
  const column = document.createElement("div");
  column.className = choice.drafted_ahead[0] ? "round ahead" : "round";
  for (let index = 0; index < choice.proposed[0]; index += 1) {
    const cell = document.createElement("i");
    if (index < accepted) cell.className = "yes";
    column.append(cell);
  }
  if (choice.drafted.some((drafted) => !drafted)) {
    const own = document.createElement("i");
    own.className = "own";
    column.append(own);
  }
  $("rounds").append(column);
  if ($("rounds").childElementCount > MOST_ROUNDS) $("rounds").firstElementChild.remove();
}

function showPositions(positions) {
  const body = $("positions").tBodies[0];
  positions.forEach((position, index) => {
    let row = body.rows[index];
    if (!row) {
      row = body.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = index + 1;
      const bar = document.createElement("div");
      bar.className = "bar";
      bar.append(document.createElement("i"));
      row.append(head);
      row.insertCell().append(bar);
      row.insertCell();
    }
    row.querySelector("i").style.width = `${(100 * position.accepted) / position.drafted}%`;
    row.cells[2].textContent = percent(position.accepted, position.drafted);
  });
}

function showFigures(run) {
  $("acceptance").textContent = percent(run.accepted, run.drafted);
  $("length").textContent = run.rounds ? run.perPass.toFixed(2) : DASH;
  $("first").textContent = `${run.firstMs.toFixed(0)} ms`;
  showPositions(run.positions);
  $("ahead").textContent = run.ahead ? `drafted ahead: ${run.ahead} of ${run.rounds}` : "drafted ahead";
  $("rounds").setAttribute(
    "aria-label",
    `${run.rounds} rounds, ${run.ahead} of them drafted ahead, ${run.accepted} of ${run.drafted} proposed tokens accepted`,
  );
}

function clear() {
  stopRace();
  $("race").hidden = true;
  $("draft-name").textContent = "With the draft";
  for (const id of ["output", "alone-output", "rounds"]) $(id).replaceChildren();
  $("positions").tBodies[0].replaceChildren();
  for (const id of ["acceptance", "length", "first", "speedup"]) $(id).textContent = DASH;
  for (const id of ["rate", "alone-rate", "said", "why"]) $(id).textContent = "";
  for (const id of ["alone", "problem", "why"]) $(id).hidden = true;
  $("speeds").setAttribute("hidden", "");
  $("rounds").removeAttribute("aria-label");
  $("ahead").textContent = "drafted ahead";
  $("speedup-name").textContent = "Speed-up";
  delete $("speedup").dataset.verdict;
  $("speedup-note").textContent = COMPARE_HINT;
}

// A slowdown has its own name and colour, and the two figures that explain it. Without a draft there is neither: two runs
// of the same differ by chance.
export function showSpeedUp(run, alone) {
  if (run.isAlone) return "";
  const factor = run.perSecond / alone.perSecond;
  const isSlower = factor < SLOWER;
  $("speedup-name").textContent = isSlower ? "Slowdown" : "Speed-up";
  $("speedup").textContent = `${factor.toFixed(2)} \u00d7`;
  $("speedup").dataset.verdict = isSlower ? "slower" : factor > 1 / SLOWER ? "faster" : "same";
  if (isSlower) showWhy(slowerBecause(run, alone));
  return ` ${factor.toFixed(2)} times as fast as the target alone.`;
}

function slowerBecause(run, alone) {
  if (run.passMs / run.perPass < alone.passMs) {
    return `Slower: the first token took ${run.firstMs.toFixed(0)} ms, the target alone's ${alone.firstMs.toFixed(0)} ms.`;
  }
  return (
    `Slower: a pass with the draft took ${run.passMs.toFixed(1)} ms and gave ${run.perPass.toFixed(2)} tokens, ` +
    `the target alone took ${alone.passMs.toFixed(1)} ms for one.`
  );
}

function showWhy(sentence) {
  $("why").textContent = $("why").textContent ? `${$("why").textContent} ${sentence}` : sentence;
  $("why").hidden = false;
}

// ---- a completion, and the same by the target alone

const requested = () => ({ ...chosen(FIELDS), prompt: $("prompt").value });

async function complete(changes, output, rate, each) {
  const body = { ...requested(), ...TRACED, return_probabilities: true, ...changes };
  const run = new Run();
  for await (const event of events(PATH, body, running.signal)) {
    const choice = event.choices[0];
    if (!choice) {
      run.state = event.speculation?.state ?? null; // the last piece tells what it took, and no text
      continue;
    }
    // Only now: a prompt that is refused has no completion to stand before.
    if (!output.hasChildNodes()) append(output, body.prompt, "prompt");
    const text = choice.text;
    run.add(choice);
    run.text += text;
    run.pieces.push([run.totalMs, text, choice]);
    appendTokens(output, text, choice);
    rate.textContent = `${run.perSecond.toFixed(1)} tokens/s`;
    each(run, choice);
  }
  return run;
}

async function completeBoth() {
  clear();
  const run = await complete({}, $("output"), $("rate"), (so_far, choice) => {
    showRound(choice);
    showFigures(so_far);
  });
  showSpeeds(run);
  if (!run.drafted) $("draft-name").textContent = "Nothing was proposed";
  if (run.state && !run.state.is_on) showWhy(`The draft was left out: ${run.state.explanation}.`);
  $("said").textContent = `Completed with ${run.tokens} tokens; ${percent(run.accepted, run.drafted)} of the proposed tokens accepted.`;
  if (!$("compare").checked) return;
  $("alone").hidden = false;
  const alone = await complete({ speculation: false, seed: run.seed }, $("alone-output"), $("alone-rate"), () => {});
  $("race").hidden = false;
  $("race").onclick = () => race([[$("output"), run], [$("alone-output"), alone]]);
  const gain = showSpeedUp(run, alone);
  const isGreedy = $("temperature").valueAsNumber === 0;
  const sameness = isGreedy ? ` The two texts are ${run.text === alone.text ? "the same" : "not the same"}.` : "";
  $("speedup-note").textContent =
    `Measured just now: ${run.tokens} tokens in ${(run.totalMs / 1000).toFixed(2)} s with the draft, ${alone.tokens} in ` +
    `${(alone.totalMs / 1000).toFixed(2)} s by the target alone. One run each, so it varies.${sameness}`;
  $("said").textContent += gain + sameness;
}

async function submit(event) {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  running = new AbortController();
  $("run").textContent = "Stop";
  $("run").dataset.running = "";
  try {
    await completeBoth();
  } catch (error) {
    if (error.name !== "AbortError") {
      $("problem").textContent = error.message;
      $("problem").hidden = false;
    }
  } finally {
    running = null;
    $("run").textContent = "Complete";
    delete $("run").dataset.running;
  }
}

// ---- the request as code, and prompts to try

function showCode() {
  if ($("code").open) showRequest("curl", "python", PATH, requested(), modelName);
}

function showSamples() {
  const buttons = SAMPLES.map((prompt) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = prompt.split("\n")[0];
    button.addEventListener("click", () => {
      $("prompt").value = prompt;
      showCode();
      $("prompt").focus();
    });
    return button;
  });
  $("samples").replaceChildren(...buttons);
}

// ---- the coordinator

function millions(count) {
  return count >= 1e9 ? `${(count / 1e9).toFixed(1)} B` : `${(count / 1e6).toFixed(1)} M`;
}

function named(replicas, role) {
  const model = replicas.find((replica) => replica.role === role && replica.model)?.model;
  if (!model) return null;
  return model.parameter_count ? `${model.name} (${millions(model.parameter_count)})` : model.name;
}

/** The models of the replicas in words. */
export function pairOf(replicas) {
  return [named(replicas, "draft"), named(replicas, "target")].filter(Boolean).join(" drafts for ");
}

function showReplicas(replicas) {
  const rows = replicas.map((replica) => {
    const row = document.createElement("tr");
    const step = replica.step_seconds === null ? DASH : `${(1000 * replica.step_seconds).toFixed(1)} ms`;
    for (const text of [replica.role, replica.address, replica.state, step]) row.insertCell().textContent = text;
    row.cells[2].className = "state";
    row.cells[2].dataset.state = replica.state;
    if (replica.reason) row.title = replica.reason;
    return row;
  });
  $("replicas").tBodies[0].replaceChildren(...rows);
}

/** What the tab shows of the coordinator's status. */
export function showStatus(status, name) {
  const { speculation, load, replicas } = status;
  modelName = name;
  $("count").placeholder = status.settings.num_speculative_tokens;
  $("all-acceptance").textContent = percent(speculation.accepted, speculation.drafted);
  $("all-length").textContent = speculation.rounds ? speculation.tokens_per_pass.toFixed(2) : DASH;
  $("all-rate").textContent = status.throughput.last_10_seconds.toFixed(1);
  $("all-running").textContent = load.queued ? `${load.running} + ${load.queued}` : load.running;
  showSpeculation(status.speculation_state);
  showReplicas(replicas);
}

function showSpeculation({ is_on: isOn, num_speculative_tokens: count, explanation }) {
  $("speculation").dataset.state = isOn ? "on" : "off";
  $("speculation").textContent = isOn ? `Speculation is on: ${count} proposed per round.` : `Speculation is off: ${explanation}.`;
}

$("form").addEventListener("submit", submit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("form").addEventListener("input", showCode);
$("code").addEventListener("toggle", showCode);
$("copy").addEventListener("click", () => navigator.clipboard.writeText($("output").textContent));
clear();
showSamples();
