// Picks the instruction-set level: the best this machine runs, or a lower one named by DS_CPU_ISA.
#include <ds/isa.h>

#include <cstdlib>
#include <cstring>

#include "kernels/table.h"

namespace ds {

#if defined(__x86_64__)
extern const Kernels kernels_avx512, kernels_avx2, kernels_baseline;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#else
extern const Kernels kernels_baseline;
#endif

namespace {

struct Level {
  const Kernels *kernels;
  bool supported;
};

int levels(Level *out) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  out[0] = {&kernels_avx512, v4};
  out[1] = {&kernels_avx2, v3};
  out[2] = {&kernels_baseline, true};
  return 3;
#elif defined(__aarch64__)
  out[0] = {&kernels_neon, true};
  return 1;
#else
  out[0] = {&kernels_baseline, true};
  return 1;
#endif
}

const Kernels &choose() {
  Level all[4];
  const int n = levels(all);
  const char *cap = std::getenv("DS_CPU_ISA");
  int first = 0;
  for (int i = 0; cap && i < n; i++)
    if (!std::strcmp(cap, all[i].kernels->name)) first = i;
  for (int i = first; i < n; i++)
    if (all[i].supported) return *all[i].kernels;
  return *all[n - 1].kernels;
}

}  // namespace

const Kernels &kernels() {
  static const Kernels &chosen = choose();
  return chosen;
}

int supported_kernels(const Kernels **out, int capacity) {
  Level all[4];
  const int n = levels(all);
  int found = 0;
  for (int i = 0; i < n && found < capacity; i++)
    if (all[i].supported) out[found++] = all[i].kernels;
  return found;
}

const char *isa_name() { return kernels().name; }

const char *isa_supported() {
  static const struct Names {
    char text[64] = {};
    Names() {
      const Kernels *all[4];
      const int n = supported_kernels(all, 4);
      for (int i = 0; i < n; i++) {
        if (i > 0) std::strcat(text, ",");
        std::strcat(text, all[i]->name);
      }
    }
  } names;
  return names.text;
}

}  // namespace ds
