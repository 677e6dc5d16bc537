// What a completion did, as far as it came.

import { percent } from "./dom.js";

/** Fields of a request whose answer tells what speculation did. */
export const TRACED = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };

export class Run {
  constructor() {
    this.started = performance.now();
    this.firstMs = null;
    this.totalMs = 0;
    this.tokens = 0;
    this.text = "";
    this.seed = null;
    this.rounds = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.ahead = 0; // rounds whose proposal was there before it was asked for
    this.positions = [];
    this.arrivals = []; // [milliseconds, tokens so far] of each piece
    this.pieces = []; // [milliseconds, text, choice], for the race
    this.state = null; // whether speculation worked at the end, as the coordinator says
  }

  add(choice) {
    this.totalMs = performance.now() - this.started;
    if (choice.token_ids.length) this.firstMs ??= this.totalMs;
    this.tokens += choice.token_ids.length;
    this.arrivals.push([this.totalMs, this.tokens]);
    this.seed = choice.seed ?? this.seed;
    this.ahead += choice.drafted_ahead.filter(Boolean).length;
    for (const proposed of choice.proposed) this.#round(proposed, choice.drafted.filter(Boolean).length);
  }

  #round(proposed, accepted) {
    this.rounds += 1;
    this.drafted += proposed;
    this.accepted += accepted;
    for (let index = 0; index < proposed; index += 1) {
      const position = (this.positions[index] ??= { drafted: 0, accepted: 0 });
      position.drafted += 1;
      position.accepted += index < accepted ? 1 : 0;
    }
  }

  get perSecond() {
    return this.totalMs ? this.tokens / (this.totalMs / 1000) : 0;
  }

  get perPass() {
    return this.tokens / this.rounds;
  }

  get passMs() {
    return (this.totalMs - this.firstMs) / Math.max(1, this.rounds - 1);
  }

  /** True if the draft took no part, so that its gain means nothing. */
  get isAlone() {
    return this.drafted === 0 || (this.state !== null && !this.state.is_on);
  }

  /** Its figures, each in words. */
  get figures() {
    if (!this.tokens) return [];
    const speed = `${this.perSecond.toFixed(1)} tokens/s`;
    const first = `first token ${this.firstMs.toFixed(0)} ms`;
    return [speed, first, `${this.tokens} token${this.tokens === 1 ? "" : "s"}`, this.#ofDraft];
  }

  get #ofDraft() {
    if (this.state !== null && !this.state.is_on) return `draft left out: ${this.state.explanation}`;
    return this.drafted ? `${percent(this.accepted, this.drafted)} of the draft accepted` : "nothing was drafted";
  }
}

/** The text of each token in a piece of an answer, and whether the draft proposed it. */
export function tokensOf(text, choice) {
  const characters = Array.from(text); // text_lengths counts characters, not UTF-16 units
  const tokens = [];
  let start = 0;
  choice.text_lengths.forEach((length, index) => {
    tokens.push([characters.slice(start, start + length).join(""), choice.drafted[index], index]);
    start += length;
  });
  return start === characters.length ? tokens : [[text, false, 0]];
}
