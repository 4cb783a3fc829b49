"""All that travels: requests, public events, normalised events, frames. Data only, no behaviour, no IO."""
