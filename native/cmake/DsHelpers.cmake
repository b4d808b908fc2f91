# The few verbs of this project:
#   ds_sources(<file>...)       plain C++ of the module `_cpu`, compiled for the lowest instruction set
#   ds_isa_sources(<file>...)   kernel files, compiled once for every instruction-set level
#   ds_binding(<function>)      `void <function>(pybind11::module_ &)` is called when `_cpu` is imported
#   ds_test(<name> <file>...)   one C++ test program under ctest
# The first three may be called from any folder; cpu/CMakeLists.txt collects them.

set(DS_WARNINGS -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
if(DS_WERROR)
  list(APPEND DS_WARNINGS -Werror)
endif()
if(DS_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DS_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${DS_SANITIZE})
endif()

# Levels: name, lanes of one vector of floats, flags. -ffp-contract=off and one order of operations make the levels
# agree to the bit; -fno-math-errno lets sqrt be an instruction.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(DS_ISA_LEVELS baseline avx2 avx512)
  set(DS_ISA_FLAGS_baseline -march=x86-64 -mtune=generic)
  set(DS_ISA_FLAGS_avx2 -march=x86-64-v3 -mtune=generic)
  set(DS_ISA_FLAGS_avx512 -march=x86-64-v4 -mtune=generic -mprefer-vector-width=512)
  set(DS_ISA_LANES_baseline 4)
  set(DS_ISA_LANES_avx2 8)
  set(DS_ISA_LANES_avx512 16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  set(DS_ISA_LEVELS neon)
  set(DS_ISA_FLAGS_neon -march=armv8-a)
  set(DS_ISA_LANES_neon 4)
else()
  set(DS_ISA_LEVELS baseline)
  set(DS_ISA_FLAGS_baseline)
  set(DS_ISA_LANES_baseline 4)
endif()

# Collected as absolute paths, so that a folder's files are named relative to that folder.
macro(_ds_collect property)
  foreach(file IN ITEMS ${ARGN})
    set_property(GLOBAL APPEND PROPERTY ${property} "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
  endforeach()
endmacro()

function(ds_sources)
  _ds_collect(DS_SOURCES ${ARGN})
endfunction()

function(ds_isa_sources)
  _ds_collect(DS_ISA_SOURCES ${ARGN})
endfunction()

function(ds_binding name)
  set_property(GLOBAL APPEND PROPERTY DS_BINDINGS ${name})
  _ds_collect(DS_BINDING_SOURCES ${ARGN})
endfunction()

# ds_isa_objects(<out>): one object library of all collected kernel files per level; <out> gets their objects.
function(ds_isa_objects out)
  get_property(sources GLOBAL PROPERTY DS_ISA_SOURCES)
  set(objects)
  foreach(level IN LISTS DS_ISA_LEVELS)
    add_library(ds_${level} OBJECT ${sources})
    target_include_directories(ds_${level} PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/cpu")
    target_compile_definitions(ds_${level} PRIVATE DS_ISA=${level} DS_LANES=${DS_ISA_LANES_${level}})
    # No exceptions, no RTTI, no std:: templates: an inline function compiled for AVX-512 would be a weak symbol that
    # the linker may hand to everyone. tools/native.py checks that these objects define none.
    target_compile_options(ds_${level} PRIVATE ${DS_ISA_FLAGS_${level}} -O3 -fno-exceptions -fno-rtti
      -ffp-contract=off -fno-math-errno -fno-trapping-math ${DS_WARNINGS} -Wno-psabi
      -Wno-maybe-uninitialized -Wno-uninitialized)  # gcc 12: its own _mm512_undefined_ps
    list(APPEND objects $<TARGET_OBJECTS:ds_${level}>)
  endforeach()
  set(${out} ${objects} PARENT_SCOPE)
endfunction()

function(ds_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE ds_kernels)
  target_compile_options(${name} PRIVATE ${DS_WARNINGS})
  add_test(NAME ${name} COMMAND ${name})
endfunction()
