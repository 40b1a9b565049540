"""The regression tester: scenarios, what is measured of them, baselines, and the comparison of both."""
