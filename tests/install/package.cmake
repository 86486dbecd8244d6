# What the tests of installed libraries share.

# Compilers' errors come through the build tool's standard output.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "failed: ${command}\n${output}")
  endif()
endfunction()

# build_example(NAME PROGRAM PREFIX LIBDIR DEFINITION...): an example over find_package, and a run of
# its program. Of the folders that an installation may name, find_package searches lib everywhere;
# others, such as lib64, on some systems alone.
function(build_example name program prefix libdir)
  if(libdir STREQUAL "lib")
    set(package "-DCMAKE_PREFIX_PATH=${prefix}")
  else()
    cmake_path(APPEND prefix "${libdir}" cmake flashmla OUTPUT_VARIABLE folder)
    set(package "-Dflashmla_DIR=${folder}")
  endif()
  file(REMOVE_RECURSE "${WORK}/${name}")
  run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLES}/${name} -B ${WORK}/${name} ${package}
      -D CMAKE_C_COMPILER=${CC} -D CMAKE_CXX_COMPILER=${CXX}
      "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror -pedantic"
      "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror -pedantic" ${ARGN})
  run(${CMAKE_COMMAND} --build ${WORK}/${name})
  run(${WORK}/${name}/${program})
endfunction()

# pkg_config_flags(RESULT PREFIX LIBDIR OPTION...): what an installation's flashmla.pc says.
function(pkg_config_flags result prefix libdir)
  find_program(pkg_config pkg-config)
  if(NOT pkg_config)
    message(FATAL_ERROR "pkg-config is not installed; the test of flashmla.pc needs it")
  endif()
  cmake_path(APPEND prefix "${libdir}" pkgconfig OUTPUT_VARIABLE folder)
  set(ENV{PKG_CONFIG_PATH} "${folder}")
  execute_process(COMMAND ${pkg_config} ${ARGN} flashmla OUTPUT_VARIABLE said
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(said UNIX_COMMAND "${said}")
  set(${result} "${said}" PARENT_SCOPE)
endfunction()
