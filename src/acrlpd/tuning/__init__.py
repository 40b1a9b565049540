"""The search for better settings: spaces, trials in processes of their own, studies that survive a kill, reports."""
