// Preact with htm in place of JSX. htm makes every value a text node or a property, never markup.

import htm from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

export { Component, Fragment, createRef, render } from "../vendor/preact.js";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal } from "../vendor/signals.js";
export const html = htm.bind(h);
