// A run's blocks: thinking, text, calls, results, images. A block is drawn again only if it changed.

import { blob } from "../lib/api.js";
import { bytes, count, ms } from "../lib/format.js";
import { Component, html, useEffect, useState } from "../lib/html.js";
import { oneLine } from "../lib/safe_text.js";
import { GrowingText } from "./growing_text.js";

const NAMES = { thinking: "thinking", text: "text", tool_call: "tool call", tool_result: "tool result", image: "image", audio: "audio", server_tool: "server tool" };
const AT_MOST = 120;
const SAFE_IMAGES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"]);

export function Blocks({ blocks, path, canSee }) {
  const [extra, setExtra] = useState(0);
  const all = blocks.filter(Boolean);
  const first = Math.max(0, all.length - AT_MOST - extra);
  return html`
    ${first > 0 && html`
      <p class="cut">${count(first)} blocks before <button onClick=${() => setExtra(extra + AT_MOST)}>Show ${AT_MOST} more</button></p>`}
    <ol class="blocks">
      ${all.slice(first).map((block) => html`<${Block} key=${block.block} block=${block} path=${path} canSee=${canSee} />`)}
    </ol>`;
}

class Block extends Component {
  shouldComponentUpdate(next) {
    return next.block !== this.props.block || next.canSee !== this.props.canSee;
  }

  render({ block, path, canSee }) {
    const isVoid = block.status === "void";
    return html`
      <li class=${`block k-${block.kind} s-${block.status}`} data-block=${block.block} data-status=${block.status}>
        <header>
          <h3>${NAMES[block.kind] ?? block.kind}${block.tool_name && html` <b>${oneLine(block.tool_name)}</b>`}</h3>
          <${Facts} block=${block} />
        </header>
        ${isVoid
          ? html`<details><summary>void: ${block.void_by?.code ?? "its attempt failed"}</summary><${Body} block=${block} path=${path} canSee=${canSee} /></details>`
          : html`<${Body} block=${block} path=${path} canSee=${canSee} />`}
      </li>`;
  }
}

function Facts({ block }) {
  const took = block.start_at !== null && block.end_at !== null ? ms(block.end_at - block.start_at) : null;
  const waited = block.result_at && block.end_at !== null ? ms(block.result_at - block.end_at) : null;
  const slot = { open: html`<span class="slot live">streaming</span>`, cut: html`<span class="slot warn">cut off</span>` }[block.status];
  // From the left, and what grows at the end, so that nothing moves while a text streams.
  return html`
    <span class="facts">
      <span>#${block.block}</span>
      ${slot ?? html`<span class="slot">${took ?? ""}</span>`}
      ${block.is_error && html`<span class="bad">error</span>`}
      ${block.input_error && html`<span class="bad">not JSON</span>`}
      ${block.text.length > 0 && html`<span>${`${count(block.text.length)} chars`}</span>`}
      ${waited && html`<span>${`result after ${waited}`}</span>`}
    </span>`;
}

function Body({ block, path, canSee }) {
  const parts = [];
  if (block.hidden > 0) parts.push(html`<p class="mute hidden-content">${count(block.hidden)} characters, hidden: you have not the role <code>see_content</code></p>`);
  if (block.kind === "image") parts.push(html`<${Picture} image=${block.image ?? block.preview} preview=${!block.image} index=${block.preview_index} prompt=${block.prompt} path=${path} canSee=${canSee} />`);
  if (block.text) parts.push(html`<${GrowingText} text=${block.text} className=${block.kind.includes("tool") ? "mono" : ""} />`);
  if (block.input_error) parts.push(html`<p class="bad">${oneLine(block.input_error)}</p>`);
  if (block.progress && block.status !== "void" && !block.result_at) parts.push(html`<${Progress} value=${block.progress} />`);
  for (const image of block.images ?? []) parts.push(html`<${Picture} key=${image.blob_id} image=${image} path=${path} canSee=${canSee} />`);
  if (block.blob_id) parts.push(html`<p class="mute">The whole result is in a blob: <${BlobLink} id=${block.blob_id} path=${path} canSee=${canSee} /></p>`);
  return parts;
}

function Progress({ value }) {
  const { progress, total, message } = value;
  return html`
    <p class="progress"><progress value=${total ? progress : undefined} max=${total ?? undefined} aria-label="Progress of the tool"></progress>
      <span>${count(progress)}${total ? ` of ${count(total)}` : ""}</span>${message && html`<bdi>${oneLine(message)}</bdi>`}</p>`;
}

function BlobLink({ id, path, canSee }) {
  const save = async () => {
    const url = URL.createObjectURL(await blob(`${path}/blobs/${encodeURIComponent(id)}`));
    const link = document.createElement("a");
    link.href = url;
    link.download = id.replace(/[^\w.-]/g, "_");
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  };
  return html`<button disabled=${!canSee} onClick=${save}>Save</button> <code>${oneLine(id)}</code>`;
}

/** An image is fetched with the session and shown from memory: its address is never in the model's hands. */
function Picture({ image, preview, index, prompt, path, canSee }) {
  const [url, setUrl] = useState(null);
  const [problem, setProblem] = useState(null);
  const key = image?.blob_id ?? image?.base64;
  useEffect(() => {
    if (!image || !canSee || !SAFE_IMAGES.has(image.media_type)) return undefined;
    let made = null;
    let gone = false;
    const data = image.blob_id ? blob(`${path}/blobs/${encodeURIComponent(image.blob_id)}`) : fromBase64(image);
    data.then(
      (content) => {
        if (gone) return;
        made = URL.createObjectURL(content);
        setUrl(made);
      },
      (error) => setProblem(error.message),
    );
    return () => {
      gone = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [key, canSee]);

  const size = image?.width && image?.height ? { width: image.width, height: image.height } : {};
  return html`
    <figure>
      <div class="picture">
        ${url && !problem
          ? html`<img src=${url} alt=${prompt ? oneLine(prompt) : "image by the model"} ...${size} onError=${() => setProblem("the browser cannot show it")} />`
          : html`<span class="mute">${problem ?? (image ? "image" : "no preview yet")}</span>`}
      </div>
      ${image && html`<figcaption class="mute">${preview ? `preview ${(index ?? 0) + 1}` : ""} ${image.media_type} ${image.width ? `${image.width} × ${image.height}` : image.size ?? ""} ${image.size_bytes ? bytes(image.size_bytes) : ""}</figcaption>`}
    </figure>`;
}

async function fromBase64(image) {
  const binary = atob(image.base64);
  return new Blob([Uint8Array.from(binary, (character) => character.charCodeAt(0))], { type: image.media_type });
}
