"""The plan: memory, arithmetic and step time of a config, before an update is compiled."""
