#include "libraries.h"

#include <dlfcn.h>

namespace ds::cuda {
namespace {

constexpr int attribute_multiprocessors = 16, attribute_major = 75, attribute_minor = 76;  // CU_DEVICE_ATTRIBUTE_*
constexpr int capture_mode_relaxed = 2;                                                   // CU_STREAM_CAPTURE_MODE_RELAXED
void *const launch_buffer = reinterpret_cast<void *>(1), *const launch_size = reinterpret_cast<void *>(2);

// Looks functions up, and remembers the first that is missing.
struct Symbols {
  void *library;
  std::string missing;
  template <class T>
  void find(T &out, const char *name) {
    out = reinterpret_cast<T>(dlsym(library, name));
    if (!out && missing.empty()) missing = name;
  }
};

void *opened(const std::string &path, std::string *problem) {
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char *why = dlerror();
    *problem = why ? why : path + " does not load";
  }
  return library;
}

}  // namespace

void Driver::open(const std::string &path) {
  devices_.clear();
  contexts_.clear();
  Symbols s{opened(path, &problem_), ""};
  if (!s.library) return;
  s.find(f_.init, "cuInit");
  s.find(f_.version, "cuDriverGetVersion");
  s.find(f_.count, "cuDeviceGetCount");
  s.find(f_.get, "cuDeviceGet");
  s.find(f_.name, "cuDeviceGetName");
  s.find(f_.attribute, "cuDeviceGetAttribute");
  s.find(f_.retain, "cuDevicePrimaryCtxRetain");
  s.find(f_.push, "cuCtxPushCurrent_v2");
  s.find(f_.pop, "cuCtxPopCurrent_v2");
  s.find(f_.capture_mode, "cuThreadExchangeStreamCaptureMode");
  s.find(f_.load, "cuModuleLoadData");
  s.find(f_.function, "cuModuleGetFunction");
  s.find(f_.launch, "cuLaunchKernel");
  s.find(f_.error, "cuGetErrorString");
  if (!s.missing.empty()) {
    problem_ = path + " has no " + s.missing + ": its driver is older than CUDA 11";
    return;
  }
  int count = 0;
  Code code = f_.init(0);
  if (code == 0) code = f_.version(&version_);
  if (code == 0) code = f_.count(&count);
  for (int i = 0; code == 0 && i < count; i++) {
    int device = 0;
    char name[256] = "";
    Device d = {};
    code = f_.get(&device, i);
    if (code == 0) code = f_.name(name, sizeof name, device);
    if (code == 0) code = f_.attribute(&d.major, attribute_major, device);
    if (code == 0) code = f_.attribute(&d.minor, attribute_minor, device);
    if (code == 0) code = f_.attribute(&d.multiprocessors, attribute_multiprocessors, device);
    d.name = name;
    devices_.push_back(d);
    contexts_.push_back(nullptr);
  }
  problem_ = code ? text(code) : count ? "" : "the driver finds no device";
}

std::string Driver::text(Code code) const {
  const char *words = nullptr;
  if (f_.error && f_.error(code, &words) == 0 && words) return words;
  return "CUDA error " + std::to_string(code);
}

// A primary context is made by whoever asks first, and torch asks for the same one.
Code Driver::enter(std::size_t device) {
  if (!contexts_[device]) {
    int handle = 0;
    Code code = f_.get(&handle, static_cast<int>(device));
    if (code == 0) code = f_.retain(&contexts_[device], handle);
    if (code) return code;
  }
  return f_.push(contexts_[device]);
}

Code Driver::load(std::size_t device, const void *image, const char *entry, Function *function) {
  Code code = enter(device);
  if (code) return code;
  int mode = capture_mode_relaxed;
  f_.capture_mode(&mode);  // loading allocates, which the stricter modes refuse while any stream is captured
  Module module = nullptr;
  code = f_.load(&module, image);
  if (code == 0) code = f_.function(function, module, entry);
  f_.capture_mode(&mode);
  Context before = nullptr;
  f_.pop(&before);
  return code;
}

Code Driver::launch(std::size_t device, Function function, unsigned blocks, unsigned threads, const void *arguments,
                    std::size_t size, Stream stream) {
  Code code = enter(device);
  if (code) return code;
  void *extra[] = {launch_buffer, const_cast<void *>(arguments), launch_size, &size, nullptr};
  code = f_.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, nullptr, extra);
  Context before = nullptr;
  f_.pop(&before);
  return code;
}

void Compiler::open(const std::string &path, const std::string &builtins) {
  architectures_.clear();
  if (!builtins.empty()) dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL);  // if that fails, the first compilation says so
  Symbols s{opened(path, &problem_), ""};
  if (!s.library) return;
  s.find(f_.version, "nvrtcVersion");
  s.find(f_.count, "nvrtcGetNumSupportedArchs");
  s.find(f_.list, "nvrtcGetSupportedArchs");
  s.find(f_.create, "nvrtcCreateProgram");
  s.find(f_.compile, "nvrtcCompileProgram");
  s.find(f_.destroy, "nvrtcDestroyProgram");
  s.find(f_.log_size, "nvrtcGetProgramLogSize");
  s.find(f_.log, "nvrtcGetProgramLog");
  s.find(f_.cubin_size, "nvrtcGetCUBINSize");
  s.find(f_.cubin, "nvrtcGetCUBIN");
  s.find(f_.ptx_size, "nvrtcGetPTXSize");
  s.find(f_.ptx, "nvrtcGetPTX");
  s.find(f_.error, "nvrtcGetErrorString");
  if (!s.missing.empty()) {
    problem_ = path + " has no " + s.missing + ": it is older than CUDA 11.2";
    return;
  }
  int count = 0;
  Code code = f_.version(&major_, &minor_);
  if (code == 0) code = f_.count(&count);
  architectures_.resize(static_cast<std::size_t>(count));
  if (code == 0 && count) code = f_.list(architectures_.data());
  problem_ = code ? f_.error(code) : "";
}

bool Compiler::compile(const std::string &source, const std::string &name, const std::vector<std::string> &options, bool ptx,
                       std::string *image, std::string *log) const {
  void *program = nullptr;
  Code code = f_.create(&program, source.c_str(), name.c_str(), 0, nullptr, nullptr);
  if (code) {
    *log = f_.error(code);
    return false;
  }
  std::vector<const char *> words;
  for (const std::string &option : options) words.push_back(option.c_str());
  code = f_.compile(program, static_cast<int>(words.size()), words.data());
  std::size_t size = 0;
  if (f_.log_size(program, &size) == 0 && size > 1) {
    log->resize(size);
    f_.log(program, log->data());
    log->resize(size - 1);
  }
  if (code == 0) code = ptx ? f_.ptx_size(program, &size) : f_.cubin_size(program, &size);
  if (code == 0) {
    image->resize(size);
    code = ptx ? f_.ptx(program, image->data()) : f_.cubin(program, image->data());
  }
  if (code && log->empty()) *log = f_.error(code);
  f_.destroy(&program);
  return code == 0;
}

}  // namespace ds::cuda
