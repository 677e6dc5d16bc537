// The request that is on the screen, as a command and as a program.

import { $ } from "./dom.js";

/** Show a request in these two elements. */
export function showCode(curl, python, path, body, model) {
  const needsToken = !$("token-option").hidden;
  $(curl).textContent = curlOf(location.origin, path, body, needsToken);
  $(python).textContent = pythonOf(location.origin, path, body, model, needsToken);
}

function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** A curl command that sends the same request. */
function curlOf(origin, path, body, needsToken) {
  const lines = [
    `curl -s ${origin}${path}`,
    "-H 'content-type: application/json'",
    ...(needsToken ? ['-H "authorization: Bearer $TANDEM_TOKEN"'] : []),
    `-d ${shellQuoted(JSON.stringify(body))}`,
  ];
  return lines.join(" \\\n  ");
}

function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, entry]) => `${JSON.stringify(name)}: ${literal(entry)}`).join(", ")}}`;
  }
  return JSON.stringify(value); // strings are spelled alike, and so are numbers
}

/** A Python program that sends the same request with OpenAI's client. */
function pythonOf(origin, path, body, model, needsToken) {
  const { num_speculative_tokens, rejection_sampling_strategy, top_k, ...known } = body;
  const ours = Object.entries({ num_speculative_tokens, rejection_sampling_strategy, top_k }).filter(([, value]) => value !== undefined);
  const isChat = path.includes("chat");
  const values = Object.entries({ model, ...known }).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (ours.length) values.push(`    extra_body=${literal(Object.fromEntries(ours))},`);
  return [
    ...(needsToken ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=${needsToken ? 'os.environ["TANDEM_TOKEN"]' : '"none"'})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...values,
    ")",
    `print(answer.choices[0].${isChat ? "message.content" : "text"})`,
  ].join("\n");
}
