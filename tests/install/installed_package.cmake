# Installs a build to a prefix, moves the prefix, and builds and runs the examples against it, once
# through find_package and once through pkg-config.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "failed: ${command}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/prefix)
set(prefix ${WORK}/prefix)

foreach(header flashmla.h flashmla.hpp status.hpp types.hpp version.h)
  if(NOT EXISTS ${prefix}/include/flashmla/${header})
    message(FATAL_ERROR "flashmla/${header} is not installed")
  endif()
endforeach()

if(NOT EXISTS ${prefix}/share/doc/flashmla/LICENSE)
  message(FATAL_ERROR "LICENSE is not installed")
endif()

foreach(example c cpp)
  run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLES}/${example} -B ${WORK}/${example}
      -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_C_COMPILER=${CC} -D CMAKE_CXX_COMPILER=${CXX}
      "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror -pedantic"
      "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror -pedantic")
  run(${CMAKE_COMMAND} --build ${WORK}/${example})
endforeach()
run(${WORK}/c/decode)
run(${WORK}/cpp/shards)

find_program(pkg_config pkg-config)
if(NOT pkg_config)
  message(FATAL_ERROR "pkg-config is not installed; the test of flashmla.pc needs it")
endif()
set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
execute_process(COMMAND ${pkg_config} --modversion flashmla OUTPUT_VARIABLE found
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT found STREQUAL VERSION)
  message(FATAL_ERROR "flashmla.pc has version ${found}; it must be ${VERSION}")
endif()
execute_process(COMMAND ${pkg_config} --cflags --libs flashmla OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
set(strict -Wall -Wextra -Werror -pedantic)
run(${CC} -std=c99 ${strict} ${EXAMPLES}/c/decode.c ${flags} -lm -o ${WORK}/decode)
run(${CXX} -std=c++20 ${strict} ${EXAMPLES}/cpp/shards.cpp ${flags} -o ${WORK}/shards)
set(ENV{LD_LIBRARY_PATH} ${prefix}/${LIBDIR})
run(${WORK}/decode)
run(${WORK}/shards)
