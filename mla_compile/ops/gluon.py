"""Names of Gluon that differ between versions of Triton."""

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # from Triton 3.7 on, and before
