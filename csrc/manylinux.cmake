# A toolchain for wheels: zig's C++ compiler (`pip install ziglang`) against glibc 2.28, with its own
# C++ library inside, so that the product runs on every Linux of the last years.
#
#   cmake -DCMAKE_TOOLCHAIN_FILE=csrc/manylinux.cmake -DCMAKE_SYSTEM_PROCESSOR=x86_64|aarch64
set(CMAKE_SYSTEM_NAME Linux)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES CMAKE_SYSTEM_PROCESSOR)
find_program(python NAMES python python3 REQUIRED)
set(CMAKE_CXX_COMPILER
    ${python} -m ziglang c++ -target ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28)
