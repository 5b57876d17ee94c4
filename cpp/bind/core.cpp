/// The module gradquorum._native: for now only the proof that it builds.
#include <nanobind/nanobind.h>

NB_MODULE(_native, m) { m.doc() = "The native engine of gradquorum."; }
