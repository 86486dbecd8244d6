# Compiles the installed headers as users may: in every standard of C and C++, with more warnings
# than this project has, and where one cannot serve it must say so.
include(${CMAKE_CURRENT_LIST_DIR}/package.cmake)

file(REMOVE_RECURSE ${WORK})
set(all -fsyntax-only -I ${SOURCE_DIR}/include)
set(strict ${all} -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wundef -Werror -pedantic)
file(WRITE ${WORK}/call.c "#include <flashmla/flashmla.h>
int main(void) {
  flashmla_decode_args args = {0};
  return flashmla_decode(&args, 0, 0, 0) == FLASHMLA_OK;
}
")
file(WRITE ${WORK}/call.cpp "#include <flashmla/flashmla.h>
int main() {
  flashmla_decode_args args = flashmla_decode_args();
  return flashmla_decode(&args, 0, 0, 0) == FLASHMLA_OK;
}
")
file(WRITE ${WORK}/call.hpp.cpp "#include <flashmla/flashmla.hpp>
int main() {
  flashmla::Workspace workspace;
  flashmla::decode({}, workspace);
}
")
foreach(standard c89 c99 c11 c17 c2x)
  run(${CC} -std=${standard} ${strict} -Wstrict-prototypes -Wwrite-strings -Wno-missing-braces
      -Wno-missing-field-initializers ${WORK}/call.c)
endforeach()
foreach(standard c++98 c++11 c++17 c++20)
  run(${CXX} -std=${standard} ${strict} -Wold-style-cast ${WORK}/call.cpp)
endforeach()
run(${CXX} -std=c++11 ${strict} -fno-exceptions -fno-rtti ${WORK}/call.cpp)
run(${CXX} -std=c++20 ${strict} -Wold-style-cast -fno-rtti ${WORK}/call.hpp.cpp)

# refuses(MESSAGE FLAG...)
function(refuses message)
  execute_process(COMMAND ${CXX} ${all} ${ARGN} ${WORK}/call.hpp.cpp RESULT_VARIABLE status
                  ERROR_VARIABLE said)
  string(FIND "${said}" "${message}" place)
  if(status EQUAL 0 OR place EQUAL -1)
    message(FATAL_ERROR "flashmla.hpp with ${ARGN} ended with ${status}: ${said}")
  endif()
endfunction()
refuses("needs C++20" -std=c++17)
refuses("needs exceptions" -std=c++20 -fno-exceptions)
