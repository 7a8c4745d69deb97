"""The decoding rule in plain torch: what every faster implementation is held to."""
