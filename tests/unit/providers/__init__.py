"""Provider decoders and request builders: bytes in, events out; requests in, HTTP calls out."""
