"""The regression tester: scenarios, their measurements, and the comparison of a measurement with its baseline."""
