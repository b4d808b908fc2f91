// The instruction-set level that runs, chosen once per process.
#pragma once

namespace ds {

// Name of the level in use: the best this machine has, capped by the environment variable DS_CPU_ISA.
const char *isa_name();

// Comma-separated names of the levels this machine could run, best first.
const char *isa_supported();

}  // namespace ds
