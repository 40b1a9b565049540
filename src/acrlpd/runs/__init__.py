"""The directory of a run: names of its files, its metrics, its record. Knows neither training nor monitoring."""
