// The two libraries of NVIDIA that the module `_cuda` uses, opened at run time: the driver, and the compiler NVRTC. No header of CUDA
// is there when a wheel is built, so the few functions are declared here, as the driver's interface has had them since CUDA 11.1.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ds::cuda {

// A library's functions return 0, or a number that `Driver::text` names.
using Code = int;
using Context = void *;
using Module = void *;
using Function = void *;
using Stream = void *;

struct Device {
  std::string name;
  int major, minor, multiprocessors;
};

// libcuda.so.1. One object a process; contexts are the primary ones, which torch uses too.
class Driver {
 public:
  // Opens the library at `path` and starts it; afterwards `problem()` is empty, or says why nothing here can be called.
  void open(const std::string &path);
  const std::string &problem() const { return problem_; }
  const std::vector<Device> &devices() const { return devices_; }
  int version() const { return version_; }

  // Loads a compiled image into the device's context. May happen while a stream is captured into a graph.
  Code load(std::size_t device, const void *image, const char *entry, Function *function);
  // Queues `blocks` blocks on `stream` of the device. `arguments`: the bytes of the kernel's one parameter; copied before return.
  Code launch(std::size_t device, Function function, unsigned blocks, unsigned threads, const void *arguments, std::size_t size,
              Stream stream);
  std::string text(Code code) const;

 private:
  Code enter(std::size_t device);
  std::string problem_ = "the driver was not opened";
  std::vector<Device> devices_;
  std::vector<Context> contexts_;
  int version_ = 0;
  struct Functions {
    Code (*init)(unsigned);
    Code (*version)(int *);
    Code (*count)(int *);
    Code (*get)(int *, int);
    Code (*name)(char *, int, int);
    Code (*attribute)(int *, int, int);
    Code (*retain)(Context *, int);
    Code (*push)(Context);
    Code (*pop)(Context *);
    Code (*capture_mode)(int *);
    Code (*load)(Module *, const void *);
    Code (*function)(Function *, Module, const char *);
    Code (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **, void **);
    Code (*error)(Code, const char **);
  } f_ = {};
};

// libnvrtc.so.N.
class Compiler {
 public:
  // builtins: a library that the one at `path` opens by name, which its folder may not be searched for; empty if unknown.
  void open(const std::string &path, const std::string &builtins);
  const std::string &problem() const { return problem_; }
  int major() const { return major_; }
  int minor() const { return minor_; }
  // The architectures that this compiler knows: 75 for sm_75.
  const std::vector<int> &architectures() const { return architectures_; }
  // Compiles `source` into `image`: SASS, or with `ptx` the text that a newer driver compiles. False: `log` says why.
  bool compile(const std::string &source, const std::string &name, const std::vector<std::string> &options, bool ptx,
               std::string *image, std::string *log) const;

 private:
  std::string problem_ = "NVRTC was not opened";
  int major_ = 0, minor_ = 0;
  std::vector<int> architectures_;
  struct Functions {
    Code (*version)(int *, int *);
    Code (*count)(int *);
    Code (*list)(int *);
    Code (*create)(void **, const char *, const char *, int, const char *const *, const char *const *);
    Code (*compile)(void *, int, const char *const *);
    Code (*destroy)(void **);
    Code (*log_size)(void *, std::size_t *);
    Code (*log)(void *, char *);
    Code (*cubin_size)(void *, std::size_t *);
    Code (*cubin)(void *, char *);
    Code (*ptx_size)(void *, std::size_t *);
    Code (*ptx)(void *, char *);
    const char *(*error)(Code);
  } f_ = {};
};

}  // namespace ds::cuda
