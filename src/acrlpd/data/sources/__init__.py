"""Where episodes come from: LeRobot datasets, ALOHA and DROID HDF5 files, the hub, and labels beside a dataset."""
