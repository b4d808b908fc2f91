// A libcuda.so.1 for machines without a GPU. It lists one device per entry of DS_FAKE_DEVICES ("9.0 132,7.5 40"; default "9.0 132"), and takes
// two kinds of image: a cubin, whose launches it records only, and a kernel compiled as C++ (emulated.h), which it runs on the CPU.
#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emulated.h"

namespace {

using ds::cuda::Emulator;

constexpr int ok = 0, invalid_value = 1, invalid_image = 200, no_function = 500, launch_failed = 719;
constexpr std::size_t stack_bytes = 64 << 10;
constexpr unsigned short machine_cuda = 190;

struct Jump {
  jmp_buf buffer;
};

// A block's threads as fibers.
struct Machine {
  jmp_buf home = {};
  std::vector<ucontext_t> starts;
  std::vector<Jump> fibers;
  std::vector<std::vector<char>> stacks;
  std::vector<std::uint64_t> slots;
  std::vector<int> state;  // 0 new, 1 waiting, 2 ended
  std::function<void()> body;
  std::uint64_t seed = 0;
  Emulator emulator = {};

  // 0..n-1 in an order drawn from `seed`; as they are while it is 0. A device promises no order of blocks or warps.
  std::vector<std::size_t> drawn(std::size_t n) {
    std::vector<std::size_t> order(n);
    for (std::size_t i = 0; i < n; i++) order[i] = i;
    for (std::size_t i = n; seed && i > 1; i--) {
      seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
      std::swap(order[i - 1], order[seed % i]);
    }
    return order;
  }
  // Runs thread `t` to its next barrier, shuffle, or end.
  void resume(std::size_t t) {
    emulator.thread.x = static_cast<std::int64_t>(t);
    if (_setjmp(home) != 0) return;
    if (state[t] == 1) _longjmp(fibers[t].buffer, 1);
    state[t] = 1;
    setcontext(&starts[t]);
  }
  void prepare(std::size_t threads);
  void run(std::size_t blocks, std::size_t threads, const std::function<void()> &kernel);
};

Machine machine;

void yield() {
  const std::int64_t me = machine.emulator.thread.x;
  if (_setjmp(machine.fibers[static_cast<std::size_t>(me)].buffer) == 0) _longjmp(machine.home, 1);
  machine.emulator.thread.x = me;
}
void enter() {
  machine.body();
  machine.state[static_cast<std::size_t>(machine.emulator.thread.x)] = 2;
  _longjmp(machine.home, 1);
}

__attribute__((noinline)) void Machine::prepare(std::size_t threads) {
  starts.resize(std::max(starts.size(), threads));
  fibers.resize(starts.size());
  slots.resize(starts.size());
  state.resize(starts.size());
  while (stacks.size() < threads) stacks.emplace_back(stack_bytes);
  emulator.yield = yield;
  emulator.slots = slots.data();
}

void Machine::run(std::size_t blocks, std::size_t threads, const std::function<void()> &kernel) {
  body = kernel;
  prepare(threads);
  for (std::size_t b : drawn(blocks)) {
    emulator.block.x = static_cast<std::int64_t>(b);
    const std::vector<std::size_t> turns = drawn(threads);
    for (std::size_t t = 0; t < threads; t++) {
      state[t] = 0;
      getcontext(&starts[t]);
      starts[t].uc_stack.ss_sp = stacks[t].data();
      starts[t].uc_stack.ss_size = stack_bytes;
      makecontext(&starts[t], enter, 0);
    }
    for (std::size_t ended = 0; ended < threads;) {  // a round of turns
      ended = 0;
      for (std::size_t t : turns) {
        if (state[t] != 2) resume(t);
        if (state[t] == 2) ended++;
      }
    }
  }
}

struct Image {
  void *library;      // of a kernel that can run
  std::string bytes;  // of one that cannot
};
struct Function {
  std::string name;
  void (*run)(const void *, Emulator *);
  std::int64_t size;
};
struct FakeDevice {
  int major, minor, multiprocessors;
};

std::vector<FakeDevice> &fake_devices() {
  static std::vector<FakeDevice> all;
  return all;
}
std::mutex guard;
std::string record;  // a line a launch
int refused = 0;     // what the next launch answers

}  // namespace

extern "C" {

// ---- for tests --------------------------------------------------------------------------------------------------------

// "device entry blocks threads bytes" of every launch since the last call, a line each.
const char *fake_launches() {
  static std::string told;
  const std::lock_guard<std::mutex> hold(guard);
  told.swap(record);
  record.clear();
  return told.c_str();
}
void fake_refuse(int code) { refused = code; }
void fake_seed(std::uint64_t seed) { machine.seed = seed; }

// ---- the driver's interface -----------------------------------------------------------------------------------------------

int cuInit(unsigned) {
  const char *text = std::getenv("DS_FAKE_DEVICES");
  std::string all = text ? text : "9.0 132";
  fake_devices().clear();
  for (std::size_t at = 0; at < all.size();) {
    FakeDevice d = {};
    std::size_t end = all.find(',', at);
    if (end == std::string::npos) end = all.size();
    if (std::sscanf(all.substr(at, end - at).c_str(), "%d.%d %d", &d.major, &d.minor, &d.multiprocessors) == 3) fake_devices().push_back(d);
    at = end + 1;
  }
  return ok;
}
int cuDriverGetVersion(int *version) { return *version = 13000, ok; }
int cuDeviceGetCount(int *count) { return *count = static_cast<int>(fake_devices().size()), ok; }
int cuDeviceGet(int *device, int i) { return *device = i, ok; }
int cuDeviceGetName(char *name, int size, int device) { return std::snprintf(name, static_cast<std::size_t>(size), "fake %d", device), ok; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  const FakeDevice &d = fake_devices()[static_cast<std::size_t>(device)];
  *value = which == 75 ? d.major : which == 76 ? d.minor : which == 16 ? d.multiprocessors : 0;
  return ok;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = reinterpret_cast<void *>(static_cast<std::intptr_t>(device) + 1), ok; }

static thread_local std::vector<void *> contexts;
int cuCtxPushCurrent_v2(void *context) { return contexts.push_back(context), ok; }
int cuCtxPopCurrent_v2(void **context) {
  if (contexts.empty()) return invalid_value;
  *context = contexts.back();
  contexts.pop_back();
  return ok;
}
int cuThreadExchangeStreamCaptureMode(int *) { return ok; }

// The file's size: the end of its section headers, which linkers and NVIDIA's compilers alike put last.
static std::size_t elf_size(const unsigned char *p) {
  std::uint64_t sections, program;
  std::uint16_t size, count, program_size, program_count;
  std::memcpy(&program, p + 32, 8), std::memcpy(&sections, p + 40, 8);
  std::memcpy(&program_size, p + 54, 2), std::memcpy(&program_count, p + 56, 2);
  std::memcpy(&size, p + 58, 2), std::memcpy(&count, p + 60, 2);
  return std::max(sections + static_cast<std::uint64_t>(size) * count, program + static_cast<std::uint64_t>(program_size) * program_count);
}

int cuModuleLoadData(void **module, const void *data) {
  const auto *p = static_cast<const unsigned char *>(data);
  if (std::memcmp(p, "\x7f" "ELF", 4) != 0) return invalid_image;
  std::uint16_t machine_type;
  std::memcpy(&machine_type, p + 18, 2);
  const std::size_t size = elf_size(p);
  auto *image = new Image{nullptr, {}};
  if (machine_type == machine_cuda) {
    image->bytes.assign(static_cast<const char *>(data), size);
  } else {
    const int file = memfd_create("kernel", 0);
    if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) return delete image, invalid_image;
    image->library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!image->library) return std::fprintf(stderr, "%s\n", dlerror()), delete image, invalid_image;
  }
  *module = image;
  return ok;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  auto *image = static_cast<Image *>(module);
  auto *f = new Function{name, nullptr, -1};
  if (image->library) {
    f->run = reinterpret_cast<void (*)(const void *, Emulator *)>(dlsym(image->library, name));
    const void *size = dlsym(image->library, (std::string(name) + "_size").c_str());
    if (!f->run || !size) return delete f, no_function;
    std::memcpy(&f->size, size, sizeof f->size);
  } else if (image->bytes.find(std::string(".text.") + name + '\0') == std::string::npos) {
    return delete f, no_function;
  }
  *function = f;
  return ok;
}
int cuLaunchKernel(void *function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned, void *, void **, void **extra) {
  auto *f = static_cast<Function *>(function);
  if (contexts.empty() || !extra || extra[0] != reinterpret_cast<void *>(1) || extra[2] != reinterpret_cast<void *>(2)) return invalid_value;
  if (refused) return std::exchange(refused, 0);
  const std::size_t size = *static_cast<std::size_t *>(extra[3]);
  {
    const std::lock_guard<std::mutex> hold(guard);
    record += std::to_string(reinterpret_cast<std::intptr_t>(contexts.back()) - 1) + " " + f->name + " " + std::to_string(blocks) + " " + std::to_string(threads) + " " + std::to_string(size) + "\n";
  }
  if (!f->run) return ok;
  if (static_cast<std::int64_t>(size) != f->size) return launch_failed;
  static std::mutex one;
  const std::lock_guard<std::mutex> hold(one);
  machine.run(blocks, threads, [&] { f->run(extra[1], &machine.emulator); });
  return ok;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == invalid_value    ? "invalid argument"
          : code == invalid_image  ? "device kernel image is invalid"
          : code == no_function    ? "named symbol not found"
          : code == launch_failed  ? "unspecified launch failure: the argument has another size"
                                   : "another error";
  return ok;
}

}  // extern "C"
