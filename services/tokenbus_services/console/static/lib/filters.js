// The fields of a search: what is typed is asked for after a pause, with what was typed in other fields meanwhile.

import { html, useEffect, useRef } from "./html.js";

const TYPED_MS = 300;

export function useFilters(filters, show) {
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const typed = useRef({});
  const put = (name, value) => {
    typed.current[name] = value.trim();
    clearTimeout(timer.current);
    show(typed.current);
    typed.current = {};
  };
  const onType = (name) => (event) => {
    const { value } = event.target;
    typed.current[name] = value.trim(); // one may type in another field before this one is asked for
    clearTimeout(timer.current);
    timer.current = setTimeout(() => put(name, value), TYPED_MS);
  };
  const field = (name, text) => html`
    <label class="search"><span class="sr">${text}</span>
      <input type="search" name=${name} placeholder=${text} defaultValue=${filters[name] ?? ""} onInput=${onType(name)} /></label>`;
  return { put, field };
}
