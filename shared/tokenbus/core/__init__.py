"""Pure logic: events in, events out. No `async`, no clock, no network; imports `events` and `providers` at most."""
