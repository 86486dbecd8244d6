# Installs the shared library of this build with each kind of library folder, moves the prefix where
# the folder is relative to it, and builds and runs examples against it, once through find_package
# and once through pkg-config. A prefix may have a space in its name.
include(${CMAKE_CURRENT_LIST_DIR}/package.cmake)

get_filename_component(library ${LIBRARY} NAME)
get_filename_component(soname ${SONAME} NAME)

# install_with(LIBDIR INCLUDEDIR PREFIX): this build's library, as a build configured so installs it.
function(install_with libdir includedir prefix)
  run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE_DIR} -B ${WORK}/build
      -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_BUILD_TYPE=${BUILD_TYPE} -D FLASHMLA_CUDA=OFF
      -D FLASHMLA_OPENMP=OFF "-DCMAKE_INSTALL_LIBDIR=${libdir}"
      "-DCMAKE_INSTALL_INCLUDEDIR=${includedir}" "-DCMAKE_INSTALL_PREFIX=${prefix}")
  file(COPY_FILE ${LIBRARY} ${WORK}/build/${library})
  file(CREATE_LINK ${library} ${WORK}/build/${soname} SYMBOLIC)
  file(CREATE_LINK ${soname} ${WORK}/build/libflashmla.so SYMBOLIC)
  run(${CMAKE_COMMAND} --install ${WORK}/build)
endfunction()

# check(LIBDIR INCLUDEDIR PREFIX): both are relative to the prefix, or absolute.
function(check libdir includedir prefix)
  cmake_path(APPEND prefix "${includedir}" OUTPUT_VARIABLE headers)
  foreach(header flashmla.h flashmla.hpp status.hpp types.hpp version.h)
    if(NOT EXISTS "${headers}/flashmla/${header}")
      message(FATAL_ERROR "flashmla/${header} is not in ${headers}")
    endif()
  endforeach()
  if(NOT EXISTS "${prefix}/share/doc/flashmla/LICENSE")
    message(FATAL_ERROR "LICENSE is not installed")
  endif()
  build_example(c decode "${prefix}" "${libdir}")

  pkg_config_flags(version "${prefix}" "${libdir}" --modversion)
  if(NOT version STREQUAL VERSION)
    message(FATAL_ERROR "flashmla.pc has version ${version}; it must be ${VERSION}")
  endif()
  pkg_config_flags(flags "${prefix}" "${libdir}" --cflags --libs)
  run(${CC} -std=c99 -Wall -Wextra -Werror -pedantic ${EXAMPLES}/c/decode.c ${flags} -lm
      -o ${WORK}/decode)
  cmake_path(APPEND prefix "${libdir}" OUTPUT_VARIABLE folder)
  run(${CMAKE_COMMAND} -E env "LD_LIBRARY_PATH=${folder}" ${WORK}/decode)
endfunction()

file(REMOVE_RECURSE ${WORK})
foreach(libdir lib lib64 lib/some-linux-gnu)
  install_with(${libdir} include "${WORK}/first")
  file(REMOVE_RECURSE "${WORK}/moved prefix")
  file(RENAME "${WORK}/first" "${WORK}/moved prefix")
  check(${libdir} include "${WORK}/moved prefix")
endforeach()
set(prefix "${WORK}/prefix that stays")
install_with("${WORK}/the libraries" include "${prefix}")
check("${WORK}/the libraries" include "${prefix}")
# In the prefix: CMake refuses headers in the source folder, where the build may lie, but for there.
install_with(lib "${prefix}/the headers" "${prefix}")
check(lib "${prefix}/the headers" "${prefix}")

build_example(cpp shards "${prefix}" lib)
pkg_config_flags(flags "${prefix}" lib --cflags --libs)
run(${CXX} -std=c++20 -Wall -Wextra -Werror -pedantic ${EXAMPLES}/cpp/shards.cpp ${flags}
    -o ${WORK}/shards)
run(${CMAKE_COMMAND} -E env "LD_LIBRARY_PATH=${prefix}/lib" ${WORK}/shards)
