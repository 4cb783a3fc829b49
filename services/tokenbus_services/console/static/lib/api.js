// Requests to the console's API. The session is a cookie that no script reads; what changes something carries a token.

export const ROOT = "/console/api";

let csrf = "";
let ticket = null;

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function rememberCsrf(token) {
  csrf = token;
}

/** The link by which a colleague without a key sees one run. */
export function useTicket(text) {
  ticket = text;
}

/** Headers of every request, streams included. */
export function headersOf(accept) {
  return ticket ? { accept, "x-console-ticket": ticket } : { accept };
}

async function call(method, path, body) {
  const headers = headersOf("application/json");
  if (method !== "GET") headers["x-console-csrf"] = csrf;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(ROOT + path, {
      method,
      headers,
      credentials: "same-origin",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new ApiError(0, "unreachable", "The gateway does not answer.");
  }
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    value = null;
  }
  if (answer.ok) return value;
  const error = value?.error;
  throw new ApiError(answer.status, error?.code ?? "error", error?.message ?? `The gateway answered ${answer.status}.`);
}

export const get = (path) => call("GET", path);
export const post = (path, body = {}) => call("POST", path, body);

/** An id for what is sent: kept while the answer is unknown, so that sending it again is the same. */
export function freshId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export async function blob(path) {
  const answer = await fetch(ROOT + path, { headers: headersOf("*/*"), credentials: "same-origin" });
  if (!answer.ok) throw new ApiError(answer.status, "error", `The gateway answered ${answer.status}.`);
  return answer.blob();
}
