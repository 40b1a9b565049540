"""The one acting path: transforms, model, critics and best-of-N; and opening any checkpoint."""
