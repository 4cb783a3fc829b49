// The title of the tab: many are open at night, so what it shows comes first.

import { useEffect } from "./html.js";
import { oneLine } from "./safe_text.js";

const LONGEST = 60;

export function useTitle(text) {
  const title = `${oneLine(text).slice(0, LONGEST)} · tokenbus`;
  useEffect(() => {
    document.title = title;
  }, [title]);
}
