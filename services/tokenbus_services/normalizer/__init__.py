"""The normalizer: raw provider bytes from `raw` become normalised events on `events`. Decoding itself is in the library."""
