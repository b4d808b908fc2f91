// The least a C++ test needs: a check that says where it failed, and random floats without <random>.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(what)                                                      \
  do {                                                                   \
    if (!(what)) {                                                       \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #what);     \
      std::exit(1);                                                      \
    }                                                                    \
  } while (0)

struct Random {
  std::uint64_t state;
  std::uint32_t bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state >> 32);
  }
  float unit() { return static_cast<float>(bits() >> 8) * (1.0f / 16777216.0f) * 2.0f - 1.0f; }
};
