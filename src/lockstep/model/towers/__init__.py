"""The towers of models for images, video or audio: loading, running and exporting them, and a tiny model."""
