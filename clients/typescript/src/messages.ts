/** A run's output as messages for the next request, as `events/run_messages.py` makes them. */

import type { BlockComplete, ExtraPart, ImageRef, Message, PublicEvent, TerminalEvent, TextPart, ImagePart } from "./types.js";

/** What a provider sends once for the whole answer, and wants back with the next request. */
const CARRIED = ["anthropic.container", "gemini-interactions.continuation_token"];
type Part = Exclude<Message["content"], string>[number];
type Extra = Record<string, unknown>;

/** How far a listener heard the run; characters are Unicode characters. */
export interface Heard {
  heardThrough?: number;
  heardCharacters?: number;
}

/** Gathers what a run's events give; those of a discarded attempt are left out. */
export class MessageBuilder {
  readonly #blocks = new Map<number, BlockComplete>();
  /** Of each block of text, its chunks by seq. */
  readonly #chunks = new Map<number, [number, string][]>();
  #participant: string | undefined;

  add(event: PublicEvent): void {
    if (event.type === "started") this.#participant = event.participant;
    if (event.type === "block_complete") this.#blocks.set(event.block, event);
    if (event.type === "chunk" && event.kind === "text") {
      const chunks = this.#chunks.get(event.block) ?? [];
      chunks.push([event.seq, event.text]);
      this.#chunks.set(event.block, chunks);
    }
    if (event.type === "retrying" || event.type === "restarted") {
      for (const of of [this.#blocks, this.#chunks]) for (const n of of.keys()) if (n >= event.drop_from) of.delete(n);
    }
  }

  /**
   * The messages of the run that ended so. `steers`: messages that came into it, with the turn that they went into.
   * `before`: of the earlier turns alone.
   */
  messages(end: TerminalEvent | undefined, heard: Heard, steers: readonly (readonly [number, readonly Message[]])[] = [], before = Infinity): Message[] {
    const told = end?.type === "cancelled" ? { heardThrough: end.heard_through, heardCharacters: end.heard_characters } : {};
    const { heardThrough: through, heardCharacters: characters } = heard.heardThrough === undefined ? told : heard;
    const all = [...this.#blocks.values()].filter(({ turn }) => turn < before).sort((a, b) => a.block - b.block);
    const kept = through === undefined ? all : all.flatMap((block) => this.#heard(block, through, characters));
    const extras = end?.provider_extra ?? [];
    const late = new Map<number, Extra>();
    for (const extra of extras) {
      const n = extra["block"];
      if (typeof n === "number" && (through === undefined || kept.some((block) => block === this.#blocks.get(n)))) late.set(n, extra);
    }
    if (steers.length === 0) return withCarried(messagesOf(kept, late, this.#participant), extras);
    const last = Math.max(0, ...all.map(({ turn }) => turn));
    const turns = new Set([...all.map(({ turn }) => turn), ...steers.map(([turn]) => turn)]);
    return [...turns].sort((a, b) => a - b).flatMap((turn) => [
      ...steers.filter(([at]) => at === turn).flatMap(([, messages]) => messages),
      ...withCarried(messagesOf(kept.filter((block) => block.turn === turn), late, this.#participant), turn === last ? extras : []),
    ]);
  }

  /** The text blocks of a turn, as far as they were heard, and whether the turn has whole calls or results of tools. */
  turn(number: number, end: TerminalEvent | undefined): { texts: string[]; calls: boolean } {
    const told = end?.type === "cancelled" ? { heardThrough: end.heard_through, heardCharacters: end.heard_characters } : {};
    const own = [...this.#blocks.values()].filter(({ turn }) => turn === number).sort((a, b) => a.block - b.block);
    const texts = own.filter(({ kind }) => kind === "text");
    const heard = told.heardThrough === undefined ? texts : texts.flatMap((block) => this.#heard(block, told.heardThrough ?? -1, told.heardCharacters));
    return { texts: heard.map(({ content }) => content ?? ""), calls: own.some(({ kind, cut }) => (kind === "tool_call" || kind === "tool_result") && !cut) };
  }

  #heard(block: BlockComplete, through: number, characters: number | undefined): BlockComplete[] {
    if (block.kind === "tool_result") return [block]; // it belongs to its call
    if (block.kind !== "text") return block.seq <= through ? [block] : [];
    let count = 0;
    for (const [seq, text] of this.#chunks.get(block.block) ?? []) {
      const length = [...text].length;
      if (seq < through || (seq === through && characters === undefined)) count += length;
      else if (seq === through) count += Math.min(length, characters ?? 0);
    }
    const content = [...(block.content ?? "")];
    if (count === 0) return [];
    if (count >= content.length) return [block];
    const { signature: _, opaque: __, opaque_blobs: ___, ...rest } = block;
    return [{ ...rest, content: content.slice(0, count).join(""), cut: true }];
  }
}

function messagesOf(blocks: BlockComplete[], late: ReadonlyMap<number, Extra>, participant: string | undefined): Message[] {
  const messages: Message[] = [];
  for (const turn of [...new Set(blocks.map((block) => block.turn))].sort((a, b) => a - b)) {
    const own = blocks.filter((block) => block.turn === turn);
    const content = own.flatMap((block) => part(block, late.get(block.block) ?? {}));
    if (content.length > 0) messages.push({ role: "assistant", content, ...(participant === undefined ? {} : { participant }) });
    const called = new Set(content.map((one) => (one.type === "tool_call" ? one.tool_id : undefined)));
    const results = own.filter((block) => block.kind === "tool_result" && called.has(block.tool_id)).map(result);
    if (results.length > 0) messages.push({ role: "tool", content: results });
  }
  return messages;
}

function withCarried(messages: Message[], extras: Extra[]): Message[] {
  const carried = new Map(extras.filter(({ name, json }) => CARRIED.includes(String(name)) && json).map(({ name, json }) => [String(name), String(json)]));
  const last = messages.findLast((message) => message.role === "assistant");
  if (last && carried.size > 0) {
    const items = [...carried].map(([name, json]): ExtraPart => ({ type: "extra", name, json }));
    last.content = [...items, ...(last.content as Part[])];
  }
  return messages;
}

function part(block: BlockComplete, late: Extra): Part[] {
  const back: { opaque?: Record<string, string>; opaque_blobs?: Record<string, string> } = {};
  for (const name of ["opaque", "opaque_blobs"] as const) {
    const both = { ...block[name], ...(late[name] as Record<string, string> | undefined) };
    if (Object.keys(both).length > 0) back[name] = both;
  }
  const { content = "", cut } = block;
  if ((block.kind === "text" || block.kind === "audio") && content) return [{ type: "text", text: content, ...back }];
  if (cut) return [];
  if (block.kind === "thinking") {
    return [{ type: "thinking", ...(content ? { text: content } : {}), ...(block.signature === undefined ? {} : { signature: block.signature }), ...back }];
  }
  if (block.kind === "tool_call") {
    const free = block.free_text ? { free_text: true } : {};
    return [{ type: "tool_call", tool_id: block.tool_id ?? "", tool_name: block.tool_name ?? "", arguments: block.arguments ?? "", ...free, ...back }];
  }
  if (block.kind === "server_tool" && isJson(content)) return [{ type: "extra", name: block.item ?? "", json: content }];
  if (block.kind === "image" && block.image && !block.image.draft) return image(block.image).map((one) => ({ ...one, ...back }));
  return [];
}

/** A result with those of its images that the model was shown. */
function result(block: BlockComplete): Part {
  const images = (block.images ?? []).filter((one) => one.size_bytes || one.base64).flatMap(image);
  const text: TextPart[] = block.content ? [{ type: "text", text: block.content }] : [];
  const content = images.length > 0 ? [...text, ...images] : (block.content ?? "");
  const name = block.tool_name === undefined ? {} : { tool_name: block.tool_name };
  return { type: "tool_result", tool_id: block.tool_id ?? "", content, ...name, ...(block.is_error ? { is_error: true } : {}) };
}

function image({ blob_id, media_type, size_bytes, base64 }: ImageRef): ImagePart[] {
  if (blob_id) return [{ type: "image", source: { type: "blob", blob_id, media_type, ...(size_bytes === undefined ? {} : { size_bytes }) } }];
  return base64 ? [{ type: "image", source: { type: "base64", media_type, data: base64 } }] : [];
}

function isJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
