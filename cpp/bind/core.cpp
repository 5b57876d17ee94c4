/// The module gradquorum._native: a list of what each file binds.
#include "common.hpp"

#include "gradquorum/tasks.hpp"

void bind_memory(nb::module_& m) {
  m.def(
      "trim_memory", [](std::size_t from_bytes) { return gq::MemoryPool::instance().trim(from_bytes); },
      nb::arg("from_bytes") = 0,
      "Give the memory kept for reuse back to the system, pieces from that size on; return how many bytes that were.");
  m.def(
      "set_memory_cap", [](std::size_t cap_bytes) { gq::MemoryPool::instance().set_cap(cap_bytes); },
      nb::arg("cap_bytes"), "Set the most bytes kept for reuse.");
  m.def(
      "memory_stats",
      [] {
        const gq::PoolStats stats = gq::MemoryPool::instance().stats();
        nb::dict out;
        out["kept_bytes"] = stats.kept_bytes;
        out["live_bytes"] = stats.live_bytes;
        out["live_buffers"] = stats.live_buffers;
        out["cap_bytes"] = stats.cap_bytes;
        return out;
      },
      "Return what the memory pool keeps and what is in use.");
  m.def(
      "_fail_allocation_after", [](long count) { gq::MemoryPool::instance().fail_after(count); }, nb::arg("count"),
      "For tests: the allocation after so many more ones fails, once; negative: none.");
  m.def(
      "_allow_wide_kernels", [](bool allowed) { gq::InstructionSet::allow_wide(allowed); }, nb::arg("allowed"),
      "For tests: forbid, or allow again, the kernels for newer processors.");
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // What a program holds when it ends is its own affair; the tests switch them on.
  m.def("_warn_of_leaks", &nb::set_leak_warnings, nb::arg("warn"), "For tests: whether to report what is alive at exit.");
  m.def("end_calls", &Unlocked::end_calls,
        "Wait for the calls of other threads; those that come later keep the GIL. To be called when the program ends.");
  m.doc() = "The native engine of gradquorum: arithmetic on gradients, and nothing else.";
  bind_arrays(m);
  bind_tensors(m);
  bind_sparse(m);
  bind_dense(m);
  bind_memory(m);
}
