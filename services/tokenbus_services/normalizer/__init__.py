"""The normalizer: raw provider bytes from `raw` become normalised events on `events`. The library decodes."""
