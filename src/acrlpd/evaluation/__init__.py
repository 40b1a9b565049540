"""The evaluation protocol: success with its interval, robustness, calibration, reports."""
