// The page at `/`: two tabs, a chat and completions, and the state of the coordinator.

import { headers, servedName } from "./api.js";
import * as chat from "./chat.js";
import * as completion from "./completion.js";
import { $ } from "./dom.js";

const POLL_MS = 2000;
const TABS = ["chat", "completion"];

let modelName = "";
let hasChosenTab = false;

// ---- tabs

function openTab(name) {
  for (const each of TABS) {
    const isOpen = each === name;
    $(`${each}-tab`).setAttribute("aria-selected", String(isOpen));
    $(`${each}-tab`).tabIndex = isOpen ? 0 : -1;
    $(`${each}-panel`).hidden = !isOpen;
  }
  document.body.dataset.tab = name;
}

function chooseTab(name) {
  hasChosenTab = true;
  openTab(name);
  history.replaceState(null, "", `#${name}`);
}

for (const name of TABS) {
  $(`${name}-tab`).addEventListener("click", () => chooseTab(name));
}
$("tabs").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = document.body.dataset.tab === "chat" ? "completion" : "chat";
  if ($(`${other}-tab`).disabled) return;
  chooseTab(other);
  $(`${other}-tab`).focus();
});

// ---- the coordinator

function setState(state) {
  if ($("state").textContent !== state) $("state").textContent = state;
  $("state").dataset.state = state;
}

async function showStatus() {
  let status;
  try {
    const response = await fetch("/tandem/status", { headers: headers() });
    if (response.status === 401) $("token-option").hidden = false;
    if (!response.ok) {
      setState(response.status === 401 ? "needs a token" : "starting");
      return;
    }
    status = await response.json();
  } catch {
    setState("unreachable");
    return;
  }
  modelName ||= await servedName();
  setState(status.state);
  $("models").textContent = completion.pairOf(status.replicas);
  $("version").textContent = `Tandem ${status.version}`;
  showTabs(status);
  chat.showStatus(status, modelName);
  completion.showStatus(status, modelName);
}

/** A model without a chat template has no chat, and one that was not trained on chats completes better. */
function showTabs(status) {
  $("chat-tab").disabled = !status.chat;
  $("chat-tab").title = status.chat ? "" : "The model has no chat template.";
  if (!status.chat) openTab("completion");
  else if (!hasChosenTab) openTab(status.instruct ? "chat" : "completion");
  hasChosenTab = true;
}

$("token").addEventListener("change", showStatus);
const wanted = location.hash.slice(1);
if (TABS.includes(wanted)) chooseTab(wanted);
else openTab("chat");
setInterval(() => {
  if (!document.hidden) showStatus();
}, POLL_MS);
showStatus();
