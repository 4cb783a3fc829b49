// Keyboard shortcuts: single keys, never while somebody types.

/** Call `handler` for this key until the function that comes back is called. */
export function shortcut(key, handler) {
  function onKey(event) {
    if (event.key !== key || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (key !== "Escape" && isTyping(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    event.preventDefault();
    handler(event);
  }
  document.addEventListener("keydown", onKey);
  return () => document.removeEventListener("keydown", onKey);
}

export function shortcuts(handlers) {
  const offs = Object.entries(handlers).map(([key, handler]) => shortcut(key, handler));
  return () => offs.forEach((off) => off());
}

function isTyping(target) {
  return target instanceof Element && (target.matches("textarea, select") || target.matches("input:not([type=range])"));
}
