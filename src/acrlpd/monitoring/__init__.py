"""Looking at a run: anomalies, device memory, profiles, the report and the terminal view."""
